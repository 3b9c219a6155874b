"""What holds for every task: a new file in ``fedfm/tasks`` is tried with one entry of ``TABLES``, and no other line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny_clip
import tiny_text
from fedfm.api.execute import run
from fedfm.api.predict import predict
from fedfm.core import tasks
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.models.export import export
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.models.wrap import wrap
from fedfm.tasks.task import Task
from fedfm.training import cached_head

SOURCES = Path(__file__).resolve().parents[2] / "src" / "fedfm"
NAMES = tuple(task.name for task in tasks.available())
WORDS = ("small grey fish", "old bird under sky", "leaf and root", "the quiet river", "a wing near water")


def rows(name):
    """Rows of a task as an experiment reads them."""
    made = {
        "classification": lambda i, text: {"text": text, "label": ("fish", "bird")[i % 2]},
        "language_modelling": lambda i, text: {"text": text},
        "instruction": lambda i, text: {"instruction": text, "output": WORDS[(i + 1) % len(WORDS)]},
        "preference": lambda i, text: {"prompt": text, "chosen": f"old {text}", "rejected": "grey"},
        "token_classification": lambda i, text: {
            "tokens": text.split(),
            "tags": ["B-ANIMAL" if word in ("fish", "bird") else "O" for word in text.split()],
        },
    }[name]
    return [made(i, f"{WORDS[i % len(WORDS)]} {WORDS[i % 4]}") for i in range(20)]


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A function that makes the rows and the tiny model of a task once: (experiment's [data], [model])."""
    folder, made = tmp_path_factory.mktemp("tasks"), {}

    def get(name):
        if name not in made:
            task, path = tasks.find(name), folder / f"{name}.jsonl"
            model = folder / ("llama" if task.is_language_model else "bert")
            if task.two_encoders:
                path, model = tiny_clip.pictures(folder / "pictures.npz"), folder / "clip"
                tiny_clip.save("clip", model)
            else:
                path.write_text("".join(f"{json.dumps(row)}\n" for row in rows(name)))
            if not model.exists():
                (tiny_text.save_llama if task.is_language_model else tiny_text.save_bert)(model)
            made[name] = path, model
        return made[name]

    return get


@pytest.fixture(params=NAMES)
def ready(request, place):
    """(task, table, model, rows of the table for the model)"""
    path, folder = place(request.param)
    table = load_table(DataSpec(path=str(path)), seed=0, task=request.param)
    spec = ModelSpec(str(folder), max_length=16, adaptation=AdaptationSpec("lora", rank=2))
    model = load_model(spec, classes=table.classes, kind=table.kind, task=request.param)
    return model.task, table, model, model.encode(model.prepare(table, range(len(table))))


def test_the_rows_imply_the_task_or_it_is_named(ready):
    task, table, _, made = ready
    assert table.kind in task.table_kinds
    assert len(made) > 1
    if task.implied_by:
        assert table.kind in task.implied_by
        assert tasks.implied_task(table.kind) == type(task)()


def test_losses_of_rows_add_up_to_the_loss(ready):
    task, _, model, made = ready
    batch = made.batch(range(min(6, len(made))))
    sums, counts = task.row_losses(model, batch)
    assert len(sums) == len(counts) == min(6, len(made))
    assert int(counts.sum()) == model.count_targets(batch) > 0
    torch.testing.assert_close(sums.sum() / counts.sum(), model.loss(batch), rtol=1e-5, atol=1e-6)
    for i in range(len(sums)):  # a row's loss does not depend on the rows of its batch
        alone, count = task.row_losses(model, made.batch([i]))
        torch.testing.assert_close(alone[0], sums[i], rtol=1e-4, atol=1e-5)
        assert count[0] == counts[i]


def test_scores_of_parts_are_those_of_the_whole(ready):
    task, _, model, made = ready
    whole = model.evaluate(made)
    cut = len(made) // 3
    joined = task.join_scores([model.evaluate(made.take(part)) for part in (range(cut), range(cut, len(made)))])
    assert joined["n"] == whole["n"] == len(made)
    assert whole["loss"] is not None
    assert all(whole[name] is not None for name in task.figures)
    for name in ("accuracy", "loss", *task.figures):
        assert joined[name] == (None if whole[name] is None else pytest.approx(whole[name], rel=1e-5)), name
    assert task.join_scores([task.join_scores([])] if task.sums else [model.evaluate(made.take([]))])["n"] == 0


def test_an_export_names_the_task_and_its_keys(ready, tmp_path):
    task, _, model, _ = ready
    export(model, model.params(), "torch", tmp_path)
    about = json.loads((tmp_path / "fedfm.json").read_text())
    assert about["task"] == task.name
    assert set(about["classes"]) == set(model.classes)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_predicts_an_entry_for_each_row(name, place, tmp_path):
    path, folder = place(name)
    out = tmp_path / "run"
    tables = {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": str(folder), "task": name, "max_length": 16, "adaptation": {"name": "lora", "rank": 2}},
        "method": {"name": "fedavg", "rounds": 1, "local": {"name": "sgd", "learning_rate": 0.1, "batch_size": 8}},
        "run": {"seed": 1, "workers": 1},
    }
    assert run(tables, out)["loss"] is not None
    found = predict(out, path)
    json.dumps(found)
    kind = tasks.find(name).own_kind
    lists = [value for key, value in found.items() if isinstance(value, list) and key not in ("classes", "warnings")]
    rows_of = len(load_table(DataSpec(path=str(path)), seed=0, task=name))
    assert (kind is not None and kind.joined) or any(len(value) == rows_of for value in lists)


def test_a_table_of_another_task_is_refused_with_the_task_that_fits(place):
    path, _ = place("instruction")
    with pytest.raises(InputError) as refusal:
        load_table(DataSpec(path=str(path)), seed=0, task="classification")
    assert '"instruction"' in str(refusal.value)


def test_names_and_columns_are_said_once():
    assert len(set(NAMES)) == len(NAMES)
    assert [task.name for task in tasks.available() if task.default] == [NAMES[0]]
    for task in tasks._all():
        assert (SOURCES / "tasks" / f"{task.name}.py").is_file()
        assert set(task.drawn) <= set(task.figures)
        assert len({column.key for column in task.columns}) == len(task.columns)
    keys = {name for name, of in DataSpec.__dataclass_fields__.items()}
    assert tasks.columns().keys() <= keys


def test_facts_of_tasks_load_no_tensors():
    code = (
        "import sys, fedfm.data.spec, fedfm.models.spec; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


NAME = "|".join(NAMES)
KINDS = "|".join(kind.name for kind in tasks.row_kinds())
COMPARED = (
    re.compile(rf"""(task|kind)\w*\s*(==|!=|in|not in)\s*([(\[{{][^)\]}}]*)?["']({NAME}|{KINDS})["']"""),
    re.compile(rf"""["']({NAME}|{KINDS})["']\s*(==|!=|in)\s*[\w.]*(task|kind)"""),
)
KEYS = re.compile(r"^ *f?[\"'].*|^.*(raise|f[\"']).*$")  # a message may name a task


def test_no_name_of_a_task_is_compared_outside_of_tasks():
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        if path.relative_to(SOURCES).parts[0] != "tasks":
            lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            compared = ((i, x) for i, x in lines if not KEYS.match(x) and any(p.search(x) for p in COMPARED))
            found += [f"{path.relative_to(SOURCES)}:{i}: {line.strip()}" for i, line in compared]
    assert not found


def test_comparisons_are_found():
    for line in ('if model.task == "preference":', "x = kind in ('text', 'passages')", 'if "zero_shot" == task:'):
        assert any(p.search(line) for p in COMPARED)
        assert not KEYS.match(line)


def test_shuffled_targets_are_other_rows(ready):
    task, table, _, _ = ready
    reader, rng = tasks.owner(table.kind) or task, np.random.default_rng(0)
    if table.labels is None and type(reader).shuffle_targets is Task.shuffle_targets:
        with pytest.raises(InputError, match="label_shuffle"):
            reader.shuffle_targets(table, rng)
        return
    other = reader.shuffle_targets(table, rng)
    assert len(other) == len(table)
    changed = other.labels is not None and (other.labels != table.labels).any()
    assert changed or list(other.inputs) != list(table.inputs)


def test_a_loss_of_its_own_is_no_cross_entropy_for_the_fast_trainers():
    """Trainers by hand compute the softmax cross-entropy: neither a task's own loss nor a user's may reach them."""

    class Squared(type(tasks.find("classification"))):
        def loss(self, model, batch):
            return model.logits(batch).square().mean()

    assert not Squared.softmax
    own = wrap(torch.nn.Linear(2, 3), lambda m, b: m(b["features"]).sum(), classes=("a", "b", "c"))
    assert not own.softmax
    assert not cached_head.applies(own)
