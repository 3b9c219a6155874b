"""The method of docs/how-to/add-a-method.md, as its reader copies it: its own test, on every engine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ENV

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-method.md"
FILES = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("simulation", marks=pytest.mark.simulation),
        pytest.param("deployment", marks=pytest.mark.deployment),
    ],
)
def test_the_newcomers_method_gives_the_same_bits_everywhere(tmp_path, engine):
    files = dict(FILES.findall(PAGE.read_text()))
    assert set(files) == {"my_methods.py", "exp.toml", "test_my_methods.py"}
    assert len(files["my_methods.py"].strip().splitlines()) <= 32
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    env = {**ENV, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ENV['PYTHONPATH']}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", engine, "test_my_methods.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "1 passed" in done.stdout
