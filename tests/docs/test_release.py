"""The scripts of release/: what they leave in dist/ is of one version, and what they sign is verified."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedfm import __version__

ROOT = Path(__file__).resolve().parents[2]


def build(python, out):
    return subprocess.run([ROOT / "release/build.sh", python, out], capture_output=True, text=True)


@pytest.mark.release
def test_a_build_leaves_no_other_version_and_no_broken_one(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "v"], check=True)
    python = tmp_path / "v/bin/python"
    done = subprocess.run([python, "-m", "pip", "install", "-q", "hatchling>=1.25"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"hatchling could not be installed: {done.stderr[-200:]}")
    out = tmp_path / "dist"
    out.mkdir()
    for name in ("fedfm-0.0.1.tar.gz", "fedfm-0.0.1-py3-none-any.whl", "other.txt"):
        (out / name).touch()
    assert build("false", out).returncode  # a build that fails takes nothing away
    assert len(list(out.iterdir())) == 3
    for _ in range(2):
        assert build(python, out).returncode == 0
        wheel, sdist = f"fedfm-{__version__}-py3-none-any.whl", f"fedfm-{__version__}.tar.gz"
        assert {p.name for p in out.iterdir()} == {wheel, sdist, "other.txt"}
    names = set(zipfile.ZipFile(out / wheel).namelist())
    sources = {f"fedfm/{p.relative_to(ROOT / 'src/fedfm')}" for p in (ROOT / "src/fedfm").rglob("*.py")}
    assert sources <= names


@pytest.fixture(scope="module")
def signer(tmp_path_factory):
    """A Python that has what release/signing.txt names."""
    folder = tmp_path_factory.mktemp("signer")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    wanted = [python, "-m", "pip", "install", "-q", "-r", ROOT / "release/signing.txt"]
    if (done := subprocess.run(wanted, capture_output=True, text=True)).returncode:
        pytest.skip(f"model-signing could not be installed: {done.stderr[-200:]}")
    return python


def key_pair(folder, name):
    """(private, public) key files on P-256."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    private.write_bytes(key.private_bytes(*pem))
    kind = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, kind))
    return private, public


@pytest.mark.release
def test_a_signed_release_is_verified_and_every_change_is_found(signer, tmp_path):
    (private, public), (_, other) = key_pair(tmp_path, "mine"), key_pair(tmp_path, "other")
    dist = tmp_path / "dist"
    dist.mkdir()
    wheel, bundle = dist / f"fedfm-{__version__}-py3-none-any.whl", dist / f"fedfm-{__version__}.sigstore.json"

    def sign():
        words = [ROOT / "release/sign.sh", signer, private, dist]
        return subprocess.run(words, capture_output=True, text=True)

    def verify(key=public):
        words = ["verify", "key", dist, "--public_key", key, "--signature", bundle]
        return subprocess.run([signer, "-m", "model_signing", *words], capture_output=True).returncode == 0

    assert "0 wheels of fedfm, expected one" in sign().stderr
    for name in (wheel.name, f"fedfm-{__version__}.tar.gz", f"fedfm-{__version__}.cdx.json"):
        (dist / name).write_text(name)
    (dist / "notes.txt").touch()
    assert f"notes.txt is not a file of fedfm {__version__}" in sign().stderr
    (dist / "notes.txt").unlink()
    for _ in range(2):  # a second signature replaces the first
        assert sign().returncode == 0
        assert verify()
    assert json.loads(bundle.read_text())["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert not verify(other)
    wheel.write_text("changed")
    assert not verify()
    wheel.write_text(wheel.name)
    (dist / "more.txt").touch()
    assert not verify()
    (dist / "more.txt").unlink()
    assert verify()
    wheel.unlink()
    assert not verify()
