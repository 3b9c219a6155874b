"""Several labels a row: reading, scores against scikit-learn, loss and Trainer of transformers, thresholds, exports."""

import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics
from task_files import jsonl, loader

import tiny_text
from fedfm.api.execute import run
from fedfm.api.predict import export, predict
from fedfm.api.prediction_files import write
from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.core.rows import Rows
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.runtime.coarse_scores import coarse
from fedfm.tasks import _label_scores
from fedfm.tasks.multi_label import MultiLabel

TASK = "multi_label"
load = loader(TASK)
WORDS = ("swim", "river", "wing", "nest", "leaf", "old")
OF_WORDS = {"bird": "wing", "plant": "leaf", "water": "river"}


def rows(n=40, seed=0):
    """Texts whose labels follow from their words; some have none."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        words = [str(word) for word in rng.choice(WORDS, 3)]
        labels = [label for label, word in OF_WORDS.items() if word in words]
        made.append({"text": " ".join(words), "label": labels, "who": "ns"[i % 2]})
    return made


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    tiny_text.save_bert(folder / "bert")
    jsonl(folder / "rows.jsonl", rows())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 4)).astype(np.float32)
    y = (x[:, :2] > 0.3).astype(np.int64)
    np.savez(folder / "rows.npz", x=x, y=y, classes=np.array(["left", "right"]), who=np.array(["n", "s"] * 40))
    return folder


def tables(place, source="rows.jsonl", **changes):
    found = {
        "data": {
            "path": str(place / source),
            "val_fraction": 0.25,
            "partition": {"name": "by_column", "column": "who"},
        },
        "model": {
            "name": str(place / "bert"),
            "task": TASK,
            "max_length": 8,
            "adaptation": {"name": "lora", "rank": 2},
        },
        "method": {"name": "fedavg", "rounds": 1, "local": {"name": "sgd", "learning_rate": 0.1, "batch_size": 8}},
        "run": {"seed": 1, "workers": 1},
    }
    if source.endswith(".npz"):
        found["model"] = {"name": "features", "task": TASK}
    for key, value in changes.items():
        table, _, name = key.partition("__")
        found.setdefault(table, {})[name] = value
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(sets=st.lists(st.sets(st.sampled_from(["a", "b c", "ä", "7"])), min_size=2, max_size=12))
def test_lists_texts_and_marks_are_the_same_labels(sets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    names = sorted(set().union(*sets))
    lists = jsonl(folder / "a.jsonl", [{"text": f"t {i}", "label": sorted(s)} for i, s in enumerate(sets)])
    lines = [f"t {i},{'; '.join(sorted(s))}" for i, s in enumerate(sets)]
    (folder / "a.csv").write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    marks = np.array([[name in s for name in names] for s in sets])
    if not names:
        with pytest.raises(InputError, match="no row has a label"):
            load(lists)
        return
    x = np.ones((len(sets), 2), np.float32)
    np.savez(folder / "a.npz", x=x, y=marks, classes=np.array(names))
    for path in (lists, folder / "a.csv", folder / "a.npz"):
        table = load(path)
        assert table.labels is None
        assert table.classes == tuple(names)
        np.testing.assert_array_equal(table.targets, marks)
        none = int((~marks.any(1)).sum())
        assert any("no label" in notice for notice in table.notices) == (none > 0)


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (3.5, 'line 2: column "label" holds 3.5: expected a list of names'),
        (True, 'line 2: column "label" holds True'),
        ({"a": 1}, 'line 2: column "label" holds'),
        (None, 'line 2: column "label" has no value: expected a list of names'),
        (float("nan"), 'line 2: column "label" has no value'),
        (["a", ""], 'line 2: entry 1 of "label" is empty'),
        (["a", None], 'line 2: entry 1 of "label" is None'),
        (["a", 1.5], 'line 2: entry 1 of "label" is 1.5'),
        (["a", "a"], 'line 2: column "label" has the label "a" twice'),
        ("a;", 'line 2: entry 1 of "label" is empty'),
        ("['a', 'b']", "a list that is not JSON"),
    ],
)
def test_a_wrong_cell_is_refused_with_its_place(label, words, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "one", "label": ["a"]}, {"text": "two", "label": label}])
    with pytest.raises(InputError, match=re.escape(words)) as refusal:
        load(path)
    assert str(path) in str(refusal.value)


def test_a_key_sets_the_separator_and_a_wrong_one_gets_a_notice(tmp_path):
    lines = ["text,label", *(f"t {i},{'a|b' if i % 3 else 'a'}" for i in range(9)), "u,b", "v,b"]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    table = load(tmp_path / "a.csv", label_separator="|")
    assert table.classes == ("a", "b")
    assert any("data.label_separator" in notice for notice in load(tmp_path / "a.csv").notices)


def test_integers_index_the_names_of_a_file(tmp_path):
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.Sequence(datasets.ClassLabel(names=["x", "y", "z"]))}
    )
    made = {"text": ["one", "two", "three"], "label": [[2], [], [0, 2]]}
    datasets.Dataset.from_dict(made, features=kinds).to_parquet(str(tmp_path / "a.parquet"))
    table = load(tmp_path / "a.parquet")
    assert table.classes == ("x", "y", "z")
    np.testing.assert_array_equal(table.targets, [[0, 0, 1], [0, 0, 0], [1, 0, 1]])


def test_a_label_that_a_client_never_has_is_zero_there(place, tmp_path):
    for name, label in (("a", ["bird"]), ("b", ["plant"])):
        jsonl(tmp_path / f"{name}.jsonl", [{"text": f"wing {i}", "label": label if i % 2 else []} for i in range(6)])
    spec = DataSpec(clients={name: str(tmp_path / f"{name}.jsonl") for name in "ab"})
    table = load_table(spec, seed=0, task=TASK)
    model = load_model(ModelSpec(str(place / "bert"), max_length=8), classes=table.classes, kind="text", task=TASK)
    targets = model.prepare(table, range(len(table))).tensors["targets"]
    np.testing.assert_array_equal(targets[:, 1].numpy(), [0] * 6 + [0, 1] * 3)
    assert MultiLabel().forewarnings({"training": table}, None) == []


def test_labels_that_cannot_be_learnt_are_noticed(tmp_path):
    made = [{"text": f"t {i}", "label": ["all", *(["late"] if i > 6 else [])]} for i in range(8)]
    table = load(jsonl(tmp_path / "a.jsonl", made), test_fraction=0)
    said = MultiLabel().forewarnings({"training": table.take(range(6))}, None)
    assert said == [
        'label "late": in no training row: no client can learn it',
        'label "all": in every training row: there is nothing to distinguish',
    ]


@pytest.mark.parametrize("kind", ["features", pytest.param("image", marks=pytest.mark.proof), "text"])
def test_check_reports_labels_that_cannot_be_learnt_for_every_kind_of_rows(kind, tmp_path, capsys):
    made = np.zeros((12, 2), dtype=np.int64)
    made[:, 0], made[:5, 1] = 1, 1
    keys = {"data.partition.name": "iid", "data.partition.clients": 2, "model.task": "multi_label"}
    if kind == "text":
        jsonl(
            tmp_path / "a.jsonl", [{"text": f"t {i}", "label": ["x", "y"][: row.sum()]} for i, row in enumerate(made)]
        )
        keys |= {"data.path": "a.jsonl", "model.name": "nano-gpt2", "model.weights": "random"}
    else:
        x = np.random.default_rng(0).integers(0, 255, (12, 8, 8, 3), dtype=np.uint8)
        np.savez(tmp_path / "a.npz", x=x if kind == "image" else x[:, 0, :, 0] / np.float32(255), y=made)
        keys |= {"data.path": "a.npz", "model.name": "features" if kind == "features" else "nano-vit"}
    keys["data.path"] = str(tmp_path / keys["data.path"])
    (tmp_path / "e.toml").write_text('[method]\nname = "fedavg"\n')
    given = [f"--set={key}={json.dumps(value)}" for key, value in keys.items()]
    assert main(["check", str(tmp_path / "e.toml"), *given, "--format=json"]) == 0
    notices = json.loads(capsys.readouterr().out.splitlines()[-1])["notices"]
    assert any("in every training row: there is nothing to distinguish" in line for line in notices), notices


# --- scores -----------------------------------------------------------------------------------------------------------


def pooled(targets, logits, threshold=0.5):
    """The scores by scikit-learn; labels without both kinds of rows are left out of the means."""
    found = torch.from_numpy(logits).double().sigmoid().numpy() >= threshold
    both = [c for c in range(targets.shape[1]) if 0 < targets[:, c].sum() < len(targets)]
    return {
        "accuracy": metrics.accuracy_score(targets, found),
        "micro_f1": metrics.f1_score(targets, found, average="micro", zero_division=np.nan),
        "macro_f1": metrics.f1_score(targets, found, average="macro", zero_division=np.nan),
        "auroc": np.mean([metrics.roc_auc_score(targets[:, c], logits[:, c]) for c in both]) if both else math.nan,
        "average_precision": (
            np.mean([metrics.average_precision_score(targets[:, c], logits[:, c]) for c in both]) if both else math.nan
        ),
    }


class Scored:
    """What a task reads of a model to make sums."""

    def __init__(self, labels):
        self.classes = tuple(f"label {c}" for c in range(labels))


def sums(task, targets, logits):
    made = Rows({"targets": torch.from_numpy(targets)})
    return task._scores_from(len(targets), task.count_of(Scored(targets.shape[1]), made, torch.from_numpy(logits)))


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    centre=st.sampled_from([0.0, -4.0, 0.1]),
    width=st.sampled_from([0.3, 1.0, 5.0]),
    threshold=st.sampled_from([0.5, 0.2]),
    clients=st.integers(2, 5),
)
def test_scores_over_clients_are_those_of_scikit_learn_on_pooled_rows(seed, centre, width, threshold, clients):
    rng = np.random.default_rng(seed)
    targets = (rng.random((400, 3)) < (0.5, 0.2, 0.3)).astype(np.float64)
    logits = (centre + width * (rng.normal(size=(400, 3)) + targets)).astype(np.float32)
    task, owner = MultiLabel(threshold=threshold), rng.integers(0, clients, 400)
    parts = [sums(task, targets[owner == k], logits[owner == k]) for k in range(clients)]
    right = pooled(targets, logits, threshold)
    for some, errors in ((parts, (1e-12, 1e-12)), ([coarse(part, task) for part in parts], (0.015, 0.04))):
        joined = task.join_scores(some)
        for name in ("accuracy", "micro_f1", "macro_f1"):
            assert joined[name] == (None if math.isnan(right[name]) else pytest.approx(right[name], abs=1e-12)), name
        assert joined["auroc"] == pytest.approx(right["auroc"], abs=errors[0])
        assert joined["average_precision"] == pytest.approx(right["average_precision"], abs=errors[1])
        assert joined["rows_by_label"] == targets.sum(0).tolist()
    assert task.join_scores(parts)["ranks"] == sums(task, targets, logits)["ranks"]


def test_a_label_without_both_kinds_of_rows_has_no_auroc():
    targets = np.array([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    found = sums(MultiLabel(), targets, np.array([[1.0, -1.0, 2.0], [2.0, -2.0, -1.0]], np.float32))
    assert found["auroc_by_label"] == [None, None, 1.0]
    assert found["auroc"] == found["average_precision"] == 1.0
    assert found["f1_by_label"] == [1.0, None, 1.0]


def test_ties_count_half_as_in_scikit_learn():
    rng = np.random.default_rng(0)
    targets, logits = rng.integers(0, 2, (60, 1)).astype(float), rng.integers(0, 4, (60, 1)).astype(np.float32)
    found, right = sums(MultiLabel(), targets, logits), pooled(targets, logits)
    for name in ("auroc", "average_precision"):
        assert found[name] == pytest.approx(right[name], abs=1e-12)


@pytest.mark.proof
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 60))
def test_no_threshold_has_a_larger_f1(seed, n):
    rng = np.random.default_rng(seed)
    targets, logits = rng.integers(0, 2, n).astype(float), rng.normal(size=n).astype(np.float32)
    (best,) = _label_scores.best_thresholds(_label_scores.rank_counts(logits[:, None], targets[:, None]), 1)
    if not targets.any():
        assert best is None
        return
    shares = 1 / (1 + np.exp(-logits.astype(float)))
    with_best = metrics.f1_score(targets, shares >= best)
    assert with_best == pytest.approx(max(metrics.f1_score(targets, shares >= p) for p in shares), abs=1e-9)


# --- loss -------------------------------------------------------------------------------------------------------------


def test_loss_is_that_of_transformers(place):
    """BertForSequenceClassification with problem_type multi_label_classification on the same batch."""
    table = load(place / "rows.jsonl")
    spec = ModelSpec(str(place / "bert"), max_length=8, adaptation=AdaptationSpec("full"))
    model = load_model(spec, classes=table.classes, kind=table.kind, task=TASK)
    batch = model.prepare(table, range(16)).batch(range(16))
    given_to = {key: value for key, value in batch.items() if key != "targets"}
    with torch.no_grad():
        found = model.module(**given_to, labels=batch["targets"].float()).loss
        torch.testing.assert_close(model.loss(batch), found)
    assert model.module.config.problem_type == "multi_label_classification"


def test_a_local_pass_is_that_of_the_trainer_of_transformers(place, tmp_path):
    """Plain SGD over all rows in one batch: both see the same batch, so that the weights agree."""
    from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

    made = tables(place, data__val_fraction=0.0, data__test_fraction=0.0, data__partition={"name": "iid", "clients": 1})
    made["model"]["adaptation"] = {"name": "full"}
    made["method"] |= {"rounds": 3, "local": {"name": "sgd", "learning_rate": 0.1, "batch_size": 64}}
    table = load(place / "rows.jsonl", test_fraction=0)
    spec = ModelSpec(str(place / "bert"), max_length=8, adaptation=AdaptationSpec("full"))
    ours = load_model(spec, classes=table.classes, kind=table.kind, task=TASK, seed=1)
    prepared = ours.prepare(table, range(len(table)))
    every = prepared.batch(range(len(table)))
    data = [
        {**{k: v[i] for k, v in every.items() if k != "targets"}, "labels": every["targets"][i].float()}
        for i in range(len(table))
    ]
    theirs = AutoModelForSequenceClassification.from_pretrained(
        place / "bert", num_labels=len(table.classes), problem_type="multi_label_classification"
    )
    theirs.load_state_dict(ours.module.state_dict())
    how = {"output_dir": str(tmp_path / "t"), "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    how |= {"per_device_train_batch_size": 64, "num_train_epochs": 3, "report_to": [], "save_strategy": "no"}
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer = Trainer(theirs, TrainingArguments(**how, max_grad_norm=0.0, use_cpu=True, logging_steps=1), None, data)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    result = run(made, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train_loss"] for line in lines[1:]] == pytest.approx(losses, abs=1e-5)
    assert result["rounds"] == 3


# --- runs -------------------------------------------------------------------------------------------------------------


def test_thresholds_by_validation_are_kept_and_used(place, tmp_path):
    made = tables(place, "rows.npz", model__threshold="validation")
    made["method"]["rounds"] = 3
    result = run(made, tmp_path / "run")
    chosen = result["details"]["threshold"]
    assert set(chosen) == {"left", "right"}
    assert all(0 < p < 1 for p in chosen.values())
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["chosen"] == {"threshold": chosen}
    found = predict(tmp_path / "run", place / "rows.npz")
    assert found["thresholds"] == chosen
    for labels, shares in zip(found["labels"], found["probabilities"], strict=True):
        assert labels == [name for name in ("left", "right") if shares[name] >= round(chosen[name], 6)]
    export(tmp_path / "run", "torch", tmp_path / "torch")
    assert json.loads((tmp_path / "torch" / "fedfm.json").read_text())["thresholds"] == chosen
    assert "is at least its threshold" in (tmp_path / "torch" / "README.md").read_text()
    html = (tmp_path / "run" / "report.html").read_text()
    assert "<h3>AUROC</h3>" in html
    assert "<h3>Micro F1</h3>" in html
    assert "Scores of each label" in html


def test_exact_sets_are_scored_at_the_chosen_thresholds(place, tmp_path):
    """The global test rows are marked, so the accuracy can be computed anew from predictions."""
    made = rows(60)
    for i, row in enumerate(made):
        row["split"] = ("train", "train", "val", "test")[i % 4]
    source = jsonl(tmp_path / "rows.jsonl", made)
    changes = {
        "data__val_fraction": 0.0,
        "model__threshold": "validation",
        "data__partition": {"name": "iid", "clients": 2},
    }
    experiment = tables(place, **changes)
    experiment["data"]["path"] = str(source)
    result = run(experiment, tmp_path / "run")
    found = predict(tmp_path / "run", source)["labels"]
    test = [i for i, row in enumerate(made) if row["split"] == "test"]
    right = [set(found[i]) == set(made[i]["label"]) for i in test]
    assert result["accuracy"] == result["global_accuracy"] == pytest.approx(np.mean(right))
    true, said = (
        [[label in of for label in OF_WORDS] for of in some]
        for some in ([made[i]["label"] for i in test], [found[i] for i in test])
    )
    assert result["macro_f1"] == pytest.approx(metrics.f1_score(true, said, average="macro", zero_division=np.nan))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__val_fraction": 0.0}, 'model.threshold = "validation" needs validation rows: set data.val_fraction'),
        (
            {"privacy__aggregator": "secagg"},
            'model.threshold = "validation": [privacy] does not cover scores on validation',
        ),
    ],
)
def test_thresholds_by_validation_are_refused_without_it(changes, words, place, tmp_path):
    with pytest.raises(InputError, match=re.escape(words)):
        run(tables(place, "rows.npz", model__threshold="validation", **changes), tmp_path / "run")


@pytest.mark.parametrize("value", [0, 1, 1.5, "best", True, [0.5]])
def test_other_thresholds_are_refused(value, place):
    with pytest.raises(InputError, match=r"model\.threshold"):
        Experiment.from_dict(tables(place, model__threshold=value))


@pytest.mark.parametrize("method", ["fedpft", "fedncm", "ccvr", "dsfl", "kd"])
def test_methods_of_one_class_are_refused_with_the_reason(method, place):
    made = tables(place, "rows.npz", method__name=method)
    made["method"] = {"name": method}
    with pytest.raises(InputError, match="have no single class"):
        Experiment.from_dict(made)


def test_partitions_by_class_are_refused(place, tmp_path):
    split = {"name": "dirichlet", "alpha": 0.5, "clients": 2}
    with pytest.raises(InputError, match="needs one class a row"):
        run(tables(place, "rows.npz", data__partition=split), tmp_path / "run")


@pytest.mark.parametrize("method", ["scaffold", "ditto", "local"])
def test_other_methods_learn(method, place, tmp_path):
    made = tables(place, "rows.npz", method__name=method)
    made["method"] |= {"rounds": 4, "local": {"name": "sgd", "learning_rate": 1.0, "batch_size": 8, "epochs": 2}}
    result = run(made, tmp_path / "run")
    assert result["details"]["auroc"] > 0.9
    assert result["details"]["local_auroc"] is not None


def test_private_steps_and_hidden_sums_work(place, tmp_path):
    private = {"mechanism": "dp_sgd", "unit": "record", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-3}
    made = tables(place, "rows.npz", data__val_fraction=0.0)
    assert run({**made, "privacy": private}, tmp_path / "dp")["epsilon"] > 0
    made["data"]["partition"] = {"name": "iid", "clients": 3}
    assert run({**made, "privacy": {"aggregator": "secagg"}}, tmp_path / "sums")["details"]["auroc"] is not None


def test_an_export_gives_the_same_probabilities(place, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run(tables(place), tmp_path / "run")
    export(tmp_path / "run", "hf", tmp_path / "hf")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    texts = [row["text"] for row in rows(4)]
    with torch.no_grad():
        shares = model(**tokenizer(texts, padding=True, truncation=True, return_tensors="pt")).logits.sigmoid()
    found = predict(tmp_path / "run", place / "rows.jsonl")
    mine = [list(row.values()) for row in found["probabilities"][:4]]
    torch.testing.assert_close(shares, torch.tensor(mine), atol=2e-6, rtol=0)
    assert [model.config.id2label[c] for c in range(3)] == found["classes"] == sorted(OF_WORDS)
    assert model.config.problem_type == "multi_label_classification"
    found["labels"][0] = ["bird", "plant"]
    write(found, tmp_path / "out.csv")
    again = load(tmp_path / "out.csv", text="row", label="labels")  # labels of a csv are read again
    assert again.targets[0].sum() == 2


def test_many_rows_are_rounded_so_that_the_counts_stay_short(monkeypatch):
    monkeypatch.setattr(_label_scores, "_EXACT", 3)
    logits = np.array([[2.0], [2.0 * 1.0003], [2.0 * 1.002], [-0.5]], np.float32)
    ranks = np.reshape(_label_scores.rank_counts(logits, np.ones((4, 1))), (-1, 3))
    assert ranks[:, 1].tolist() == [1, 2, 1]  # within 0.06 % of each other
    assert _label_scores.add_ranks([]) == []


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-4, 4), min_size=1, max_size=80),
    scale=st.sampled_from([1e-4, 0.1, 1.0, 30.0, 1e5]),
    shift=st.sampled_from([0.0, 0.3, -4.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_a_silo_sends_one_of_34_bins_for_each_row_whatever_the_servers_scale(values, scale, shift, seed):
    """What is told is a function of the numbers of rows in at most 34 bins of a label."""
    logits = (np.array(values) * scale + shift).astype(np.float32)[:, None]
    has = np.random.default_rng(seed).integers(0, 2, (len(values), 1)).astype(float)
    fine = _label_scores.rank_counts(logits, has)
    told = _label_scores.coarse_ranks(fine, 1)
    for part in (1, 2):
        assert sum(told[part::3]) == sum(fine[part::3])
    ((z, with_label, without),) = _label_scores._by_label(told, 1)
    again = _label_scores.coarse_ranks(_label_scores.add_ranks([told]), 1)
    middle = z
    width = bin_width(fine)
    assert (
        len(np.unique(np.floor(middle / width * (1 - 1e-6)))) <= 36
    )  # a row at the edge may be in the fine bin across
    rows = np.sort(logits[:, 0].astype(float))
    moved = np.abs(np.sort(np.repeat(middle, with_label + without)) - rows)
    if len(rows) > 20 and scale > 1e-3 * abs(shift):
        assert moved.max() > 1e-3 * np.ptp(rows)  # no row is told to three digits
    assert len(again) <= len(told)


def bin_width(fine):
    """The width of the bins that a silo tells, from its definition."""
    ((z, with_label, without),) = _label_scores._by_label(fine, 1)
    logits = np.repeat(z, with_label + without)
    low, high = (np.sort(logits)[math.ceil(share * len(logits) - 1e-9) - 1] for share in (0.05, 0.95))
    return 2.0 ** math.ceil(math.log2(max((high - low) / 24, max(abs(low), abs(high)) / 64, 1e-30)))


def test_the_sent_counts_depend_only_on_the_bins():
    """Rows that move within their bins change nothing."""
    rng = np.random.default_rng(0)
    logits, has = rng.normal(size=200), rng.integers(0, 2, (200, 1)).astype(float)
    fine = _label_scores.rank_counts(logits[:, None], has)
    width, low, high = bin_width(fine), *np.quantile(logits, (0.05, 0.95))
    inner = (logits > low + width) & (logits < high - width)
    moved = np.where(inner, (np.floor(logits / width) + rng.uniform(0.05, 0.95, 200)) * width, logits)
    assert np.abs(moved - logits).max() > width / 4
    other = _label_scores.coarse_ranks(_label_scores.rank_counts(moved[:, None], has), 1)
    assert other == _label_scores.coarse_ranks(fine, 1)


def test_counts_of_labels_are_found_without_a_pass_for_each_label(monkeypatch):
    """A client sends the counts, so the work may not grow faster than they do."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(7, 40))
    ranks = _label_scores.rank_counts(logits, logits > 0)
    place = np.reshape(ranks, (-1, 3))[:, 0]
    sizes, asked = [], np.split

    def split(of, ends):
        sizes.append(len(of))
        return asked(of, ends)

    monkeypatch.setattr(np, "split", split)
    parts = _label_scores._by_label(ranks, 40)
    assert sum(sizes) == len(ranks)  # each count is looked at once
    expected = [int((place // (_label_scores._KEYS) == c).sum()) for c in range(40)]
    assert [len(z) for z, _, _ in parts] == expected


def test_an_empty_separator_is_refused_with_its_key(tmp_path):
    (tmp_path / "r.csv").write_text("text,label\na,b\n")
    with pytest.raises(InputError, match=r'data\.label_separator = "": expected the text between two labels'):
        load(tmp_path / "r.csv", label_separator="")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_places_keep_the_values_and_their_order(values):
    z = np.array(values, np.float32)
    keys = _label_scores._keys(z)
    assert np.array_equal(_label_scores._values(keys), z.astype(float))
    assert np.array_equal(np.unique(z, return_inverse=True)[1], np.unique(keys, return_inverse=True)[1])
    assert 0 <= keys.min() <= keys.max() < 2**32
