"""The method of docs/how-to/add-a-method.md, as its reader copies it: its own test, on every engine."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedfm.aggregation import median
from processes import ENV

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-method.md"
FILES = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)


@pytest.mark.release
@pytest.mark.parametrize("engine", ["simulation", "deployment"])
def test_the_newcomers_method_gives_the_same_bits_everywhere(tmp_path, engine):
    passes(tmp_path, "-k", engine, "test_my_methods.py")


@pytest.mark.filterwarnings("default")  # as in the reader's own tests
def test_the_newcomers_step_is_that_of_numpy(tmp_path, monkeypatch):
    copy(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("test_aggregate").test_a_step_is_that_of_numpy(tmp_path / "run")


def test_the_page_counts_its_lines():
    text = PAGE.read_text()
    words = " ".join(text.split())
    assert f"It has {len(dict(FILES.findall(text))['my_methods.py'].splitlines())} lines:" in words
    count = len(Path(median.__file__).read_text().splitlines())
    assert f"`fedfm.aggregation.median` is one of {count} lines." in words


def copy(folder):
    """Write the page's files into the folder."""
    files = dict(FILES.findall(PAGE.read_text()))
    assert set(files) == {"my_methods.py", "exp.toml", "test_my_methods.py", "test_aggregate.py"}
    for name, text in files.items():
        (folder / name).write_text(text)


def passes(folder, *arguments):
    """The page's files lie in the folder, and one test there passes, in a process of its own."""
    copy(folder)
    env = {**ENV, "PYTHONPATH": f"{folder}{os.pathsep}{ENV['PYTHONPATH']}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=540)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "1 passed" in done.stdout
