"""``fedfm sign`` and ``fedfm verify``: every change of a signed run is found, and named."""

import json
import os
import shutil
import stat
import subprocess

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.api import execute
from fedfm.api.signature import sign, verify
from fedfm.cli import main
from fedfm.config.toml import to_toml
from fedfm.errors import InputError
from fedfm.reports import html
from small import experiment


@pytest.fixture(autouse=True)
def _own_config(tmp_path_factory, monkeypatch):
    """A user without a key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    """(signed run, its private key) of Ditto, which keeps a model for each client."""
    folder = tmp_path_factory.mktemp("signed")
    execute.run(experiment(folder, method={"name": "ditto", "rounds": 2}), folder / "run")
    key = folder / "keys" / "officer.pem"
    sign(folder / "run", key)
    return folder / "run", key


@pytest.fixture
def copy(signed, tmp_path):
    """A copy of the signed run, and the public key."""
    run = shutil.copytree(signed[0], tmp_path / "copy")
    return run, signed[1].with_name("officer.pem.pub")


def covered(run):
    return sorted(json.loads((run / "signature.json").read_text())["files"])


def test_the_signature_covers_every_file_but_what_is_private(signed):
    run, _ = signed
    there = {str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()}
    public = {name for name in there if not name.startswith("private/")} - {"signature.json"}
    assert set(covered(run)) == public
    assert {"manifest.json", "metrics.jsonl", "messages.jsonl", "report.html"} < public
    assert any(name.startswith("clients/") for name in public)
    assert any(name.startswith("checkpoint/") for name in public)


def test_the_signature_can_be_checked_without_fedfm(signed):
    run, key = signed
    body = json.loads((run / "signature.json").read_text())
    signature = bytes.fromhex(body.pop("signature"))
    public = load_pem_public_key(key.with_name("officer.pem.pub").read_bytes())
    assert isinstance(public, Ed25519PublicKey)
    assert public.public_bytes_raw().hex() == body["key"]
    parts = (b"s", b"fedfm signature of a folder"), (b"b", json.dumps(body, indent=1).encode())
    text = b"".join(kind + len(data).to_bytes(8, "little") + data for kind, data in parts)
    public.verify(signature, text)
    with pytest.raises(InvalidSignature):
        public.verify(signature, text + b" ")
    sums = "".join(f"{digest}  {name}\n" for name, digest in body["files"].items())
    subprocess.run(["sha256sum", "--check", "--quiet"], cwd=run, input=sums, text=True, check=True)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_changed_byte_is_found(signed, data):
    run, key = signed
    name = data.draw(st.sampled_from([*covered(run), "signature.json"]))
    path = run / name
    whole = path.read_bytes()
    place, value = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    try:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ value]) + whole[place + 1 :])
        found = verify(run, key.with_name("officer.pem.pub"))
        assert not found.valid
        assert not found.genuine if name == "signature.json" else found.changed == (name,)
    except InputError:  # the signature's version has become a larger number
        assert name == "signature.json"
    finally:
        path.write_bytes(whole)
    assert verify(run, key.with_name("officer.pem.pub")).valid


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_truncated_and_lengthened_files_are_found(signed, data):
    run, key = signed
    path = run / (name := data.draw(st.sampled_from([*covered(run), "signature.json"])))
    whole = path.read_bytes()
    length = data.draw(st.integers(0, len(whole) - 1))
    try:
        for content in (whole[:length], whole + b"\n", whole + whole[:length] + b"0"):
            path.write_bytes(content)
            found = verify(run, key.with_name("officer.pem.pub"))
            assert not found.valid
            assert name == "signature.json" or found.changed == (name,)
    finally:
        path.write_bytes(whole)


def test_swapped_missing_added_and_linked_files_are_named(copy):
    run, public = copy
    a, b = sorted(run.glob("clients/*/adapter/*.safetensors"))[:2]
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other), b.write_bytes(one)
    swapped = tuple(str(p.relative_to(run)) for p in (a, b))
    assert verify(run, public).changed == swapped
    a.write_bytes(one), b.write_bytes(other)

    (run / "metrics.jsonl").rename(run / "metrics.old")
    found = verify(run, public)
    assert (found.missing, found.added, found.changed) == (("metrics.jsonl",), ("metrics.old",), ())
    (run / "metrics.old").rename(run / "metrics.jsonl")

    elsewhere = run.parent / "elsewhere.jsonl"
    shutil.move(run / "metrics.jsonl", elsewhere)
    (run / "metrics.jsonl").symlink_to(elsewhere)
    assert verify(run, public).changed == ("metrics.jsonl",)
    (run / "metrics.jsonl").unlink()
    shutil.move(elsewhere, run / "metrics.jsonl")

    os.mkfifo(run / "checkpoint" / "pipe")  # reading it would never end
    (run / "clients" / "more").symlink_to(run.parent)
    assert set(verify(run, public).added) == {"checkpoint/pipe", "clients/more"}
    (run / "checkpoint" / "pipe").unlink(), (run / "clients" / "more").unlink()
    assert verify(run, public).valid


def test_private_files_are_not_covered(copy):
    run, public = copy
    shutil.rmtree(run / "private")
    assert verify(run, public).valid


def test_a_checkpoint_folder_on_another_disk_is_covered(copy):
    run, public = copy
    shutil.move(run / "checkpoint", run.parent / "disk")
    (run / "checkpoint").symlink_to(run.parent / "disk")
    assert verify(run, public).valid
    newest = max((run.parent / "disk").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    assert verify(run, public).changed == (f"checkpoint/{newest.name}",)


def test_a_run_that_went_on_after_its_signature_is_found(tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedfm.runtime.run_directory.Run.join_arrays", stop)  # after the last round
        with pytest.raises(KeyboardInterrupt):
            execute.run(experiment(tmp_path), tmp_path / "run")
    sign(tmp_path / "run")
    assert verify(tmp_path / "run").valid
    execute.resume(tmp_path / "run")
    assert "manifest.json" in verify(tmp_path / "run").changed
    sign(tmp_path / "run")
    execute.resume(tmp_path / "run")  # of a finished run: it only prints the result
    html.write(tmp_path / "run")  # the same files give the same bytes
    assert verify(tmp_path / "run").valid


def test_a_key_is_trusted_only_if_it_is_the_users_own_or_an_argument(copy, tmp_path, capsys):
    run, public = copy
    assert main(["verify", str(run)]) == 1  # it is as somebody signed it
    assert "UNKNOWN KEY" in capsys.readouterr().out
    assert main(["verify", str(run), "--format", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["valid"], told["intact"], told["key_known"]) == (False, True, False)
    assert main(["verify", str(run), "--key", str(public)]) == 0
    out = capsys.readouterr().out
    assert "UNKNOWN" not in out
    assert f"holds    {'manifest.json'}" in out

    manifest = json.loads((run / "manifest.json").read_text())
    manifest["result"]["accuracy"] = 1.0
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert main(["verify", str(run), "--key", str(public)]) == 1
    assert "changed  manifest.json" in capsys.readouterr().out
    sign(run, tmp_path / "forger.pem")  # whoever can change a file can sign the run again
    assert main(["verify", str(run)]) == 1  # it is as somebody signed it
    assert "UNKNOWN KEY" in capsys.readouterr().out
    assert main(["verify", str(run), "--format", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["valid"], told["intact"], told["key_known"]) == (False, True, False)
    assert main(["verify", str(run), "--key", str(public)]) == 1
    assert "not the key of --key" in capsys.readouterr().out
    found = verify(run, public)
    assert (found.genuine, found.pinned_other, found.trusted) == (True, True, None)

    sign(run)
    assert main(["verify", str(run), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["trusted"] == "own"


def test_a_signature_cannot_be_moved_to_another_key_or_run(copy, signed, tmp_path):
    run, public = copy
    own = (run / "signature.json").read_text()
    sign(run, tmp_path / "other.pem")
    key = json.loads((run / "signature.json").read_text())["key"]
    body = json.loads(own)
    (run / "signature.json").write_text(own.replace(body["key"], key))
    assert not verify(run).genuine
    shutil.copy(signed[0] / "signature.json", run)
    assert verify(run, public).valid
    (run / "signature.json").write_text(own.replace(body["signature"], body["signature"].upper()))
    assert not verify(run, public).genuine  # the same signature in other letters


def test_the_key_is_made_once_and_only_its_owner_reads_it(tmp_path, signed, monkeypatch, capsys):
    run = shutil.copytree(signed[0], tmp_path / "run")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    key = tmp_path / "config" / "fedfm" / "signing.pem"
    assert main(["sign", str(run)]) == 0
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert sorted(p.name for p in key.parent.iterdir()) == ["signing.pem", "signing.pem.pub"]
    first = key.read_bytes()
    assert main(["sign", str(run)]) == 0
    assert key.read_bytes() == first
    key.chmod(0o640)
    assert main(["sign", str(run)]) == 2
    assert "chmod 600" in capsys.readouterr().err


@pytest.mark.parametrize("make", ["ed25519", "rsa"])
def test_a_key_of_openssl(make, tmp_path, signed):
    run, key = shutil.copytree(signed[0], tmp_path / "run"), tmp_path / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", make, "-out", key], check=True, capture_output=True)
    key.chmod(0o600)
    if make == "rsa":
        with pytest.raises(InputError, match="expected an Ed25519 private key"):
            sign(run, key)
        return
    public = tmp_path / "public.pem"
    sign(run, key)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
    assert verify(run, public).trusted == "pinned"
    assert verify(run, tmp_path / "key.pem.pub").trusted == "pinned"
    (tmp_path / "key.pem.pub").write_bytes(signed[1].with_name("officer.pem.pub").read_bytes())
    with pytest.raises(InputError, match="public half of another key"):
        sign(run, key)
    with pytest.raises(InputError, match="expected an Ed25519 public key"):
        verify(run, key)


def test_unsuitable_folders_and_keys_are_refused(copy, tmp_path, capsys):
    run, _ = copy
    with pytest.raises(InputError, match="must not be in the folder"):
        sign(run, run / "private" / "key.pem")
    assert not (run / "private" / "key.pem").exists()
    (tmp_path / "text.pem").write_text("no key")
    (tmp_path / "text.pem").chmod(0o600)
    with pytest.raises(InputError, match="expected an Ed25519 private key"):
        sign(run, tmp_path / "text.pem")
    with pytest.raises(InputError, match="this is a folder of runs"):
        sign(tmp_path)
    (run / "checkpoint" / "link").symlink_to(run / "manifest.json")
    with pytest.raises(InputError, match="is a link"):
        sign(run)
    (run / "checkpoint" / "link").unlink()
    with Locked(run), pytest.raises(InputError, match="another process"):
        sign(run)
    (run / "signature.json").unlink()
    assert main(["verify", str(run)]) == 2
    assert "is not signed" in capsys.readouterr().err


class Locked:
    """Another process that runs this run."""

    def __init__(self, run):
        self.command = ["flock", str(run / "private" / "lock"), "sh", "-c", "echo; cat"]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process.stdout.readline()

    def __exit__(self, *_):
        self.process.communicate()


def test_an_exported_model_can_be_signed(signed, tmp_path):
    exp = tmp_path / "exp.toml"
    exp.write_text(to_toml(experiment(tmp_path)))
    assert main(["run", str(exp), "--out", str(tmp_path / "run")]) == 0
    out = tmp_path / "model"
    assert main(["export", str(tmp_path / "run"), "--to", "torch", "--out", str(out)]) == 0
    sign(out, signed[1])
    assert verify(out, signed[1].with_name("officer.pem.pub")).trusted == "pinned"
    path = next(out.glob("*.safetensors"))
    path.write_bytes(path.read_bytes() + b" ")
    assert verify(out).changed == (path.name,)


def test_a_file_has_no_signature(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert main(["verify", str(tmp_path / "file")]) == 2
    assert "is not signed" in capsys.readouterr().err
