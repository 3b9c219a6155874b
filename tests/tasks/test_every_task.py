"""The contract of every task: a new file in ``fedfm/tasks`` is tested with one entry of ``task_places.rows``."""

import functools
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedfm.api.execute import run
from fedfm.api.predict import export as export_run
from fedfm.api.predict import predict
from fedfm.audits import fedbip_view
from fedfm.core import tasks
from fedfm.core.fields import bounds_of, key_of, settings_of, types_of
from fedfm.core.row_kinds import SHARED
from fedfm.core.text import several
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import ClientFault, InputError
from fedfm.models.export import export
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.models.wrap import wrap
from fedfm.runtime import own_rows
from fedfm.runtime.coarse_scores import coarse
from fedfm.runtime.evaluation import check_scores
from fedfm.sites import silo_config
from fedfm.tasks.task import Task
from fedfm.training import cached_head
from small import jsonl
from task_places import NAMES, Places, rows, tables

SOURCES = Path(__file__).resolve().parents[2] / "src" / "fedfm"


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A function that makes the rows and the tiny model of a task once: (experiment's [data], [model])."""
    return Places(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(params=NAMES)
def ready(request, place):
    """(task, table, model, rows of the table for the model)"""
    path, folder = place(request.param)
    table = load_table(DataSpec(path=str(path)), seed=0, task=request.param)
    spec = ModelSpec(str(folder), max_length=16, adaptation=AdaptationSpec("lora", rank=2))
    model = load_model(spec, classes=table.classes, kind=table.kind, task=request.param)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # adapters of zeros would make margins of zero, whose signs are those of rounding
        for weight in (p for p in model.module.parameters() if p.requires_grad):
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
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
    if task.mixes_rows:
        with pytest.raises(InputError, match=task.mixes_rows):
            task.row_losses(model, batch)
        return
    sums, counts = task.row_losses(model, batch)
    assert len(sums) == len(counts) == min(6, len(made))
    assert int(counts.sum()) == model.count_targets(batch) > 0
    torch.testing.assert_close(sums.sum() / counts.sum(), model.loss(batch), rtol=1e-5, atol=1e-6)
    for i in range(len(sums)):  # a row's loss does not depend on the rows of its batch
        alone, count = task.row_losses(model, made.batch([i]))
        torch.testing.assert_close(alone[0], sums[i], rtol=1e-4, atol=1e-5)
        assert count[0] == counts[i]


@pytest.mark.sample("classification", "embedding", "regression", "token_classification")
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_figures_over_clients_are_those_of_their_rows(ready, data):
    """However rows are dealt to clients, of which some may have none."""
    task, _, model, made = ready
    whole = model.evaluate(made)
    holders = data.draw(st.lists(st.integers(0, 3), min_size=len(made), max_size=len(made)))
    parts = [[i for i, holder in enumerate(holders) if holder == client] for client in range(5)]
    scores = [model.evaluate(made.take(part)) for part in parts]
    joined = task.join_scores(scores)
    assert joined["n"] == whole["n"] == len(made)
    assert whole["loss"] is not None
    assert all(whole[name] is not None for name in (*task.figures, *task.sums))
    for name in ("accuracy", "loss", "perplexity", *task.figures, *task.sums):
        assert joined[name] == (None if whole[name] is None else pytest.approx(whole[name], rel=1e-5)), name
    if sum(map(bool, parts)) > 1:
        assert joined["balanced_accuracy"] is None  # it needs counts by class, which none tells
        assert joined["macro_f1"] is None or joined["macro_f1"] == pytest.approx(whole["macro_f1"])
    of_silos = task.join_scores([coarse(found, task) for found in scores])  # with few digits, and of enough rows
    whole = task.join_scores([found for found in scores if found["n"] >= task.least_rows])
    from_bins = {"auroc", "average_precision"}  # a silo tells few bins of its rows, see test_multi_label
    for name in ("accuracy", "loss", "perplexity", *(set(task.figures) - set(task.lists) - from_bins)):
        close = 5e-3 if name == "perplexity" else 1e-3  # of a sum of losses with four digits, exp
        assert of_silos[name] == (None if whole[name] is None else pytest.approx(whole[name], rel=close, abs=1e-3)), (
            name
        )
    whole = joined
    in_pairs = [task.join_scores(scores[:2]), task.join_scores(scores[2:])]  # what is joined may be joined again
    assert task.join_scores(in_pairs)["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_a_silo_reports_no_sums_of_rows_that_are_too_few(ready):
    task, _, model, made = ready
    few = coarse(model.evaluate(made.take(range(task.least_rows - 1))), task)
    assert few.keys() <= {"n"} or task.least_rows == 1
    check_scores(few, task, model.classes)
    enough = coarse(model.evaluate(made.take(range(task.least_rows))), task)
    assert enough.keys() > {"n"}
    joined = task.join_scores([enough, few])  # rows without sums are left out
    assert joined["loss"] == pytest.approx(enough["loss"])


WRONG = (0, -1, 1e300, -1e300, 0.5, None, [], [None], [1e300] * 3, [-5, -5, -5], [0, 1] * 7, [2**62, 1, 1], 2**63)
WRONG_ENTRIES = (0, -1, 1e300, None, 2**62, -(2**62), 0.5)


@pytest.mark.sample("classification", "multi_label", "preference", "token_classification")
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_scores_that_a_client_made_up_are_refused_or_give_scores(ready, data):
    """Whatever a client tells, no joined score is impossible, and nothing ends the run of the others."""
    task, _, model, made = ready
    honest = coarse(model.evaluate(made), task)
    for right in (honest, model.evaluate(made), model.evaluate(made.take([]))):
        check_scores(right, task, model.classes)
    false = dict(honest)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(false)))
        value = false[name]
        how = data.draw(st.sampled_from(["another", "shorter", "longer", "entry"]))
        if how == "another" or not isinstance(value, list) or not value:
            false[name] = data.draw(st.sampled_from(WRONG))
        elif how == "entry":
            at, entry = data.draw(st.integers(0, len(value) - 1)), data.draw(st.sampled_from(WRONG_ENTRIES))
            false[name] = [*value[:at], entry, *value[at + 1 :]]
        else:
            false[name] = value[:-1] if how == "shorter" else [*value, data.draw(st.sampled_from(WRONG_ENTRIES))]
    try:
        check_scores(false, task, model.classes)
    except ClientFault:
        return
    for parts in ([false], [honest, false], [false, honest, false]):
        joined = task.join_scores(parts)
        json.dumps(joined, allow_nan=False)
        for name in ("accuracy", "macro_f1", *task.drawn):
            assert joined.get(name) is None or -1e-9 <= joined[name] <= 1.001, name
        for chosen in task.choose(joined, model.classes).values():
            assert set(chosen) == set(model.classes)
            assert all(0 <= p <= 1 for p in chosen.values())


def test_a_server_can_set_no_key_of_a_task_by_a_question_for_scores(ready):
    task, _, model, _ = ready
    for chosen in ({"threshold": {"a": 0.5}}, {"name": {}}, {"target_means": {}}, {"beta": {"x": 1.0}}):
        with pytest.raises(ClientFault, match="chosen"):
            task.with_chosen(chosen, model.classes)
    assert task.with_chosen({}, model.classes) == task


def test_an_audit_compares_rows_by_their_loss(ready):
    _, _, model, made = ready
    if model.task.mixes_rows:
        pytest.skip("a row has no loss of its own")
    rows = made.take(range(min(5, len(made))))
    found = fedbip_view.row_losses(model, rows)
    alone = [float(model.loss(rows.batch([i])).detach()) for i in range(len(rows))]
    assert found.tolist() == pytest.approx(alone, rel=1e-4, abs=1e-5)


def test_methods_on_features_can_fit_and_score_a_linear_head(ready):
    task, _, model, made = ready
    if not (task.linear_head and (task.one_class_a_row or task.own_targets)):  # what method "analytic" takes
        pytest.skip("no linear head on one vector a row")
    assert task.head_targets(made, len(model.classes)).shape == (len(made), len(model.classes))
    found, logits = task.scores(model, made), model.predict(made, 64)
    assert task.scores_of(model, made, logits) == found
    assert found["loss"] is not None


def test_scores_of_no_rows_are_none(ready):
    task, _, model, made = ready
    for found in (
        task.join_scores([]),
        model.evaluate(made.take([])),
        task.join_scores([model.evaluate(made.take([]))]),
    ):
        assert found["n"] == 0
        assert all(found.get(name) is None for name in ("accuracy", "loss", "perplexity", *task.figures))


def test_a_sum_that_is_not_finite_hides_its_own_figures_alone(ready):
    task, _, model, made = ready
    scores = model.evaluate(made)
    spoilt = [task.join_scores([scores, scores | {name: None, "loss": None}]) for name in task.sums]
    joined = min((found for found in spoilt if found["loss"] is None), key=lambda found: [*found.values()].count(None))
    assert joined.get("perplexity") is None
    assert joined.get("accuracy") == pytest.approx(scores.get("accuracy"))
    assert task.join_scores([scores, {"n": 7}]) == scores  # who tells no sums is left out


def test_an_export_names_the_task_and_its_keys(ready, tmp_path):
    task, _, model, _ = ready
    export(model, model.params(), "torch", tmp_path)
    about = json.loads((tmp_path / "fedfm.json").read_text())
    assert about["task"] == task.name
    assert set(about["classes"]) == set(model.classes)


@pytest.mark.sample(
    "classification", "instruction", "multi_label", "regression", "segmentation", "token_classification"
)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_asks_for_its_own_task_alone_and_predicts_an_entry_for_each_row(name, place, asked, tmp_path):
    path, _ = place(name)
    out = tmp_path / "run"
    result, task = run(tables(place(name), name), out), tasks.find(name)
    assert result["loss"] is not None
    for figure in task.figures:  # the clients' test rows together are the global ones
        assert result["details"][f"local_{figure}"] == pytest.approx(result["details"][figure], rel=1e-5)
    joined = task.own_kind is not None and task.own_kind.joined  # each client's text is cut into blocks of its own
    for figure in task.common_figures:
        assert result["details"][f"local_{figure}"] == pytest.approx(result[figure], rel=0.1 if joined else 1e-5)
    export_run(out, "torch", tmp_path / "torch")
    readme = (tmp_path / "torch" / "README.md").read_text()
    for figure in ("loss", *(name for name in task.figures if name not in task.lists)):
        assert f"| {figure.replace('_', ' ')} | " in readme
    assert asked == {name}
    found = predict(out, path)
    json.dumps(found)
    kind = tasks.find(name).own_kind
    lists = [value for key, value in found.items() if isinstance(value, list) and key not in ("classes", "warnings")]
    rows_of = len(load_table(DataSpec(path=str(path)), seed=0, task=name))
    assert (kind is not None and kind.joined) or any(len(value) == rows_of for value in lists)


@pytest.fixture(scope="session")
def finished(place, tmp_path_factory):
    """A function that runs a task once and returns the folder of the run."""

    @functools.cache
    def folder(name):
        out = tmp_path_factory.mktemp("finished") / name
        run(tables(place(name), name), out)
        return out

    return folder


TARGETS = ("label", "output", "chosen", "rejected", "positive", "mask", "tags")  # columns that a prediction replaces


def files_to_predict(name, path):
    """Files for a run of the task: by name those with rows, and those without."""
    if path.suffix == ".npz":  # pictures
        stored = dict(np.load(path))
        x = stored["x"]
        made = {"bare": {"x": x}, "single": {"x": x[:1]}, "more": {**stored, "unknown": np.arange(len(x))}}
        made["none"] = {"x": x[:0]}
        files = {key: path.with_name(f"{key}.npz") for key in made}
        for key, arrays in made.items():
            np.savez(files[key], **arrays)
        empty, none = path.with_name("empty.npz"), files.pop("none")
    else:
        full = rows(name)
        bare = [{key: value for key, value in row.items() if key not in TARGETS} for row in full]
        bare = [{**row, "messages": row["messages"][:-1]} if "messages" in row else row for row in bare]
        more = [{**row, "unknown": "b"} for row in full]
        made = {"bare": bare, "single": bare[:1], "more": more}
        files = {key: jsonl(path.with_name(f"{name}-{key}.jsonl"), part) for key, part in made.items()}
        empty, none = path.with_name("empty.jsonl"), path.with_name(f"{name}-none.csv")
        none.write_text(f"{','.join(full[0])}\n")
    empty.write_bytes(b"")
    return files, (empty, none)


@pytest.mark.sample("classification", "language_modelling", "regression", "segmentation", "token_classification")
@pytest.mark.parametrize("name", NAMES)
def test_files_without_targets_with_one_row_or_more_columns_are_predicted_and_empty_ones_refused(name, place, finished):
    files, empty = files_to_predict(name, place(name)[0])
    found = {key: predict(finished(name), file) for key, file in files.items()}
    for key, value in found["single"].items():
        if isinstance(value, list) and value and key not in ("classes", "warnings", "cut"):
            assert len(value) == 1, key
            assert len(found["bare"][key]) == len(found["more"][key]) > 1, key
            assert key == "masks" or found["bare"][key] == found["more"][key], key  # masks are files of each call
    for file in empty:
        with pytest.raises(InputError, match=r"is empty|no rows") as refusal:
            predict(finished(name), file)
        assert str(file) in str(refusal.value)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["instruction", "language_modelling", "sequence_to_sequence"])
def test_rows_of_another_task_are_not_predicted_and_no_other_task_is_advised(name, place, finished):
    with pytest.raises(InputError, match=r'no column .* found "tokens", "tags"') as refusal:
        predict(finished(name), place("token_classification")[0])
    assert "model.task" not in str(refusal.value)


@pytest.mark.parametrize("name", NAMES)
def test_notices_to_a_silo_name_its_targets_in_the_tasks_words(name, place, tmp_path):
    task, file = tasks.find(name), tmp_path / "silo.toml"
    file.write_text(f'name = "north"\ndata = "{place(name)[0]}"\ntask = "{name}"\n')
    silo, found = silo_config.load(file), silo_config.report(file)
    line, classes = silo_config.render(found).splitlines()[0], found["classes"]
    words = f", {len(classes)} {task.class_word if len(classes) == 1 else several(task.class_word)}"
    assert line.endswith(words if task.needs_classes else "test rows"), line
    if task.needs_classes:
        table = own_rows.deal(silo.rows, DataSpec(), seed=0, task=name).table
        with pytest.raises(InputError, match=f"the server's {several(task.class_word)} are"):
            own_rows._with_classes(silo.rows, table, ("others",), name)


def test_a_table_of_another_task_is_refused_with_the_task_that_fits(place):
    path, _ = place("instruction")
    with pytest.raises(InputError) as refusal:
        load_table(DataSpec(path=str(path)), seed=0, task="classification")
    assert '"instruction"' in str(refusal.value)


@pytest.mark.parametrize("task", NAMES)
def test_rows_of_another_task_lead_to_a_task_that_reads_them(task, place):
    """A refusal may name another task, and that task's refusal a third one, but never one that refused before."""
    for name in NAMES:
        tried, now = [], task
        while now is not None:
            tried.append(now)
            try:
                load_table(DataSpec(path=str(place(name)[0])), seed=0, task=now)
                break
            except InputError as error:
                named = re.search(r'model\.task = "(\w+)"', str(error))
                now = None if named is None else named[1]
            assert now not in tried, f"rows of {name}: {tried}"


@pytest.mark.parametrize(
    ("rows", "task", "words"),
    [
        ({"image": "a.png", "label": "x"}, None, 'column "image" holds paths of images.*metadata.csv'),
        ({"scan": "a/b.JPG", "label": "1.5"}, "regression", 'column "scan" holds paths of images.*metadata.csv'),
        ({"audio": "a.wav", "label": "x"}, None, 'column "audio" holds paths of recordings'),
        ({"audio": "a.wav", "words": "x"}, "embedding", 'column "audio" holds paths of recordings'),
        ({"age": "44", "dose": "0.5", "label": "x"}, None, 'columns "age", "dose" hold numbers.*npz'),
        ({"image": "a.png", "label": "x"}, "visual_instruction", '"image", "label"; data.messages says'),
    ],
)
def test_files_and_numbers_in_cells_are_named(rows, task, words, tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [rows] * 3)
    with pytest.raises(InputError, match=words):
        load_table(DataSpec(path=str(path)), seed=0, task=task)


def test_names_and_columns_of_tasks_are_unique():
    assert len(set(NAMES)) == len(NAMES)
    assert [task.name for task in tasks.available() if task.default] == [NAMES[0]]
    kinds = [kind.name for kind in tasks.row_kinds()]
    assert len({*kinds, *SHARED}) == len(kinds) + len(SHARED)
    for name in tasks._names():
        task = tasks.find(name)
        assert task.name == name  # as the file
        assert task.in_files == (name in NAMES)
        assert set(task.drawn) <= set(task.figures)
        assert set(task.lists) <= {*task.figures, *task.sums}
        assert len({column.key for column in task.columns}) == len(task.columns)


def test_a_kind_of_rows_implies_one_task():
    """So it does not matter in which order tasks are asked, and images, texts and vectors imply the default."""
    assert {kind for task in tasks.available() if not task.default for kind in task.implied_by}.isdisjoint(SHARED)
    assert set(tasks.default().implied_by) == set(SHARED)
    for kind in (kind.name for kind in tasks.row_kinds()):
        assert sum(kind in task.implied_by for task in tasks.available()) <= 1


def test_tasks_that_share_a_column_agree_on_it():
    """A column has one form and one default name, whichever task is asked for it."""
    found = {}
    for task in tasks.available():
        for column in task.columns:
            assert (column.default, column.several) == found.setdefault(column.key, (column.default, column.several))
            assert not hasattr(DataSpec, column.key)


def test_a_key_of_a_task_is_its_own():
    """It has one default, one type and the same bounds, whichever tasks have it, and is refused with any other task."""
    settings_of_model = tasks.model_settings()
    assert not {f.name for f in fields(ModelSpec)} & settings_of_model.keys()
    assert set(settings_of_model) <= {key for key, _, _ in settings_of(ModelSpec)}
    for key, (hint, of) in settings_of_model.items():
        for task in tasks.available():
            own = {key_of(f.name): f for f in fields(task)}
            changed = replace(ModelSpec("m"), **{key: "another value"})
            if key in own:
                assert own[key].default == of.default
                assert bounds_of(own[key]) == bounds_of(of)
                assert types_of(type(task))[own[key].name] == hint
                tasks.check_keys(changed, task)
                assert getattr(task.of(changed), own[key].name) == "another value"
            else:
                with pytest.raises(InputError, match=rf"model\.{key} belongs to task"):
                    tasks.check_keys(changed, task)
            tasks.check_keys(ModelSpec("m"), task)


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
    if table.labels is table.targets is None and type(reader).shuffle_targets is Task.shuffle_targets:
        with pytest.raises(InputError, match="label_shuffle"):
            reader.shuffle_targets(table, rng)
        return
    other = reader.shuffle_targets(table, rng)
    assert len(other) == len(table)
    changed = other.labels is not None and (other.labels != table.labels).any()
    changed |= other.targets is not None and (other.targets != table.targets).any()
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


TEXT = "fish " * 40
LONG = {  # tasks whose texts are not in the column "text"
    **{name: {"instruction": TEXT} for name in ("instruction", "sequence_to_sequence")},
    "preference": {"prompt": TEXT},
    "embedding": {"anchor": TEXT},
    "token_classification": {"tokens": TEXT.split()},
}


@pytest.mark.sample("classification", "preference")
@pytest.mark.parametrize("name", NAMES)
def test_predict_says_what_it_does_not_read_of_a_text(name, place, tmp_path):
    if name in ("language_modelling", "segmentation", "visual_instruction", "zero_shot"):
        return  # a text is scored in blocks; the others have no texts, or refuse one that is too long
    run(tables(place(name), name), tmp_path / "run")
    found = predict(tmp_path / "run", jsonl(tmp_path / "rows.jsonl", [LONG.get(name, {"text": TEXT})]))
    assert [text for text in found["warnings"] if "(model.max_length)" in text], found["warnings"]
