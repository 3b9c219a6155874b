"""The scripts of release/: what they leave in dist/ is of one version."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
