"""The task of docs/how-to/add-a-task.md, as its reader copies it: one more file in the folder of tasks."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedfm

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-task.md"
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
COMMANDS = """
import json, sys
from fedfm.cli import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
"""


@pytest.mark.proof
def test_the_guides_task_runs_whole(tmp_path):
    blocks = BLOCKS.findall(PAGE.read_text())
    task, rows = (text for language, text in blocks if language == "python")
    (experiment,) = (text for language, text in blocks if language == "toml")
    (console,) = (text for language, text in blocks if language == "console")
    with_one_more_task(tmp_path / "fedfm", "score.py", task)
    (tmp_path / "films.toml").write_text(experiment)
    (tmp_path / "rows.py").write_text(rows)
    words = [line.removeprefix("$ fedfm ").split() for line in console.splitlines()]
    assert [verb for verb, *_ in words] == ["check", "run", "predict", "export", "audit"]
    python(tmp_path, "rows.py")
    python(tmp_path, "-c", COMMANDS, str(words).replace("'", '"'))
    with open(tmp_path / "scores.csv") as file:
        superb, dull = (float(row["values"]) for row in csv.DictReader(file))
    assert superb > dull
    check = "from transformers import AutoModelForSequenceClassification as M; print(M.from_pretrained('films-model'))"
    assert "GPT2ForSequenceClassification" in python(tmp_path, "-c", check)


def with_one_more_task(package, name, text):
    """A copy of fedfm by links, with one more file in its folder of tasks."""
    source = Path(fedfm.__file__).parent
    (package / "tasks").mkdir(parents=True)
    for folder in ("", "tasks"):
        for entry in (source / folder).iterdir():
            if entry.name not in ("tasks", "__pycache__"):
                (package / folder / entry.name).symlink_to(entry)
    (package / "tasks" / name).write_text(text)


def python(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
