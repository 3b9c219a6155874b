"""Two versions of fedfm, one minor version apart, work together and say so; others are refused by name."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfm import __version__
from fedfm.core.wire.flower_records import WIRE
from fedfm.engines.answers import other_version, parse_hello, works_with
from fedfm.errors import E_VERSION

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = st.integers(0, 99)


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_versions_one_minor_version_apart_work_together(a, b, c, x, y, z):
    here, there = f"{a}.{b}.{c}", f"{x}.{y}.{z}"
    assert works_with(here, there) == works_with(there, here) == (a == x and abs(b - y) <= 1)
    assert works_with(here, here)


@given(st.text(max_size=40) | st.none() | st.integers() | st.lists(st.integers()))
def test_no_other_text_is_a_version_that_works(text):
    assert not works_with(text, "1000.0.0")


@pytest.mark.parametrize("version", ["0.2.0", "0.3.0", "0.1.9", "0.3.0rc1", "0.2.1.dev4+g12ab"])
def test_a_near_version_takes_part_and_is_named_once(version, monkeypatch):
    monkeypatch.setattr("fedfm.engines.answers.__version__", "0.2.0")
    hello = {"name": "a", "fedfm": version, "wire": WIRE}
    assert parse_hello(hello, None, ["a"]) == ("a", None)
    assert (version in other_version("a", hello)) == (version != "0.2.0")


@pytest.mark.parametrize("version", ["0.0.9", "0.4.0", "1.2.0", "2", None, 2, "0.2.0\n", "0.2.0 ", "v0.2.0"])
def test_a_far_version_is_left_out(version, monkeypatch):
    monkeypatch.setattr("fedfm.engines.answers.__version__", "0.2.0")
    _, fault = parse_hello({"name": "a", "fedfm": version, "wire": WIRE}, None, ["a"])
    assert fault.code == E_VERSION
    assert "but the server runs 0.2.0" in fault.reason
    assert parse_hello({"name": "a", "fedfm": "0.2.0", "wire": WIRE + 1}, None, ["a"])[1].code == E_VERSION


def wheel(folder: Path, version: str) -> Path:
    """fedfm built as a wheel of another version, and unpacked next to the installed one."""
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        text = (ROOT / name).read_text()
        (source / name).write_text(text.replace(f'version = "{__version__}"', f'version = "{version}"', 1))
    file = source / "src/fedfm/version.py"
    file.write_text(file.read_text().replace(__version__, version))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", folder / version, source], capture_output=True, text=True)
    if done.returncode:
        done = subprocess.run([*pip[:-1], "--target", folder / version, source], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the wheel could not be built: {done.stderr[-300:]}")
    return folder / version


@pytest.mark.release
@pytest.mark.deployment
def test_a_superlink_of_one_version_and_a_silo_of_the_next_one_run_together(tmp_path):
    from kit_sites import sites

    major, minor, _ = __version__.split(".", 2)
    place = wheel(tmp_path, f"{major}.{int(minor) + 1}.0")
    folder = tmp_path / "at"
    folder.mkdir()
    with sites(folder, rounds=2, within={"hospital-b": ["env", f"PYTHONPATH={place}"]}) as at:
        at.start()
        result = at.result(at.begin())
        assert result["excluded"] == []
        assert result["rounds"] == 2
        notices = json.loads((folder / "run/manifest.json").read_text())["notices"]
        assert [n for n in notices if f"hospital-b runs fedfm {place.name}, and the server {__version__}" in n]
        assert not [n for n in notices if "hospital-a runs" in n]
