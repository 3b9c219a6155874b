"""The task of docs/how-to/add-a-task.md, as its reader copies it: one more file in the folder of tasks."""

import ast
import csv
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fedfm
from fedfm.tasks.task import Task

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-task.md"
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
COMMANDS = """
import json, sys
from fedfm.cli import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0, words
"""


@pytest.mark.proof
def test_the_guides_task_runs_from_training_to_export(tmp_path):
    blocks = BLOCKS.findall(PAGE.read_text())
    task, rows = (text for language, text in blocks if language == "python")
    (experiment,) = (text for language, text in blocks if language == "toml")
    (console,) = (text for language, text in blocks if language == "console")
    copy(Path(fedfm.__file__).parent, tmp_path / "fedfm", {"tasks/score.py": task})
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


@pytest.mark.proof
def test_the_guides_task_passes_the_tests_of_every_task(tmp_path):
    text, tests = PAGE.read_text(), Path(__file__).parents[1]
    task = BLOCKS.search(text)[2]
    (line,) = re.findall(r'^```py\n("score": .*)\n```$', text, re.M)
    places = (tests / "task_places.py").read_text()
    assert places.count("    made = {\n") == 1
    copy(Path(fedfm.__file__).parent, tmp_path / "fedfm", {"tasks/score.py": task})
    changed = {"task_places.py": places.replace("    made = {\n", f"    made = {{\n        {line}\n")}
    of_every_task = (tests / "tasks" / "test_every_task.py").read_text()
    copy(tests, tmp_path / "tests", changed | {"tasks/test_every_task.py": of_every_task})
    (tmp_path / "pyproject.toml").symlink_to(tests.parent / "pyproject.toml")
    arguments = ("-q", "-p", "no:cacheprovider", "tests/tasks/test_every_task.py", "-k", "[score]")
    assert " passed" in python(tmp_path, "-m", "pytest", *arguments)


def test_the_guide_gives_the_arguments_of_every_member_that_it_names():
    """So an author who reads the guide alone can write the member."""
    text = PAGE.read_text()
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    members = {name: of for name, of in inspect.getmembers(Task, inspect.isfunction) if not name.startswith("_")}
    given = {name: [] for name in members}
    shown = [
        ast.walk(ast.parse(code)) for language, code in BLOCKS.findall(text) if "def " in code and language != "toml"
    ]
    for one in itertools.chain(*shown):
        if isinstance(one, ast.FunctionDef) and one.name in members:
            given[one.name].append([a.arg for a in (*one.args.args, *one.args.kwonlyargs)][1:])
    for name, arguments in re.findall(r"`(\w+)\((.*?)\)`", prose, re.S):
        if name in members:
            given[name].append([word for word in arguments.replace(",", " ").split() if word != "*"])
    for name, of in members.items():
        (_, *parameters) = inspect.signature(of).parameters.values()
        names = [one.name for one in parameters]
        assert all(one == names for one in given[name]), (name, names, given[name])
        assert given[name] or not names or f"`{name}`" not in prose, f"the guide names {name} without {names}"


def copy(source, target, files):
    """A copy of a folder by links, with further or other files in it, by their paths."""
    folders = {Path(name).parent for name in files} | {Path()}
    for folder in folders:
        (target / folder).mkdir(parents=True, exist_ok=True)
        for entry in (source / folder).iterdir():
            at = entry.relative_to(source)
            if entry.name != "__pycache__" and str(at) not in files and at not in folders:
                (target / at).symlink_to(entry)
    for name, text in files.items():
        (target / name).write_text(text)


def python(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
