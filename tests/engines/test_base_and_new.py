"""Accuracies on base and new classes, against counts from the output of `fedfm predict`."""

import json

import numpy as np
import pytest
import torch

import fedfm
from fedfm.api.predict import predict
from fedfm.errors import InputError
from fedfm.models.base_and_new import base_and_new
from fedfm.reports import compare
from fedfm.reports.html import write as write_report
from tiny_clip import pictures, save

LOCAL = {"name": "adam", "learning_rate": 0.02, "batch_size": 16}
METHODS = {
    "zero_shot": ("lora", {}),
    "fedavg": ("prompt", {"rounds": 2, "local": LOCAL}),
    "fedclip": ("lora", {"rounds": 2, "local": LOCAL}),
    "fedpgp": ("prompt", {"rounds": 2, "local": LOCAL}),
    "fedms": ("lora", {"global_rounds": 1, "local_rounds": 1, "local": LOCAL}),
}
MODELS = [*((name, None) for name in METHODS), ("fedavg", "full"), ("fedavg", "lora")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("new")
    save("clip", path / "model")
    rows = dict(np.load(pictures(path / "three.npz")))
    rows["y"] = rows["y"] + 3 * ((np.arange(160) % 2) & (rows["y"] < 2))  # five classes
    np.savez(path / "rows.npz", **rows | {"classes": np.array(["fox", "small_dog", "bird", "cow", "photo"])})
    test = rows["split"] == "test"
    np.savez(path / "test.npz", x=rows["x"][test])
    return path


def tables(place, name="fedavg", adaptation=None, data=None, **model):
    default, keys = METHODS[name]
    partition = {"name": "iid", "clients": 2}
    return {
        "data": {"path": str(place / "rows.npz"), "partition": partition} | (data or {}),
        "model": {
            "name": str(place / "model"),
            "task": "zero_shot",
            "base_classes": 2,
            "adaptation": {"name": adaptation or default, "rank": 2, "tokens": 3},
        }
        | model,
        "method": {"name": name} | keys,
    }


def by_hand(place, out, client, base=2):
    """The protocol with loops."""
    right, rows = {True: [], False: []}, np.load(place / "rows.npz")
    said = predict(out, place / "test.npz", client=client)["probabilities"]
    for scores, label in zip(said, rows["y"][rows["split"] == "test"].tolist(), strict=True):
        among = [c for c in range(len(scores)) if (c < base) == (label < base)]
        right[label < base].append(max(among, key=scores.__getitem__) == label)
    b, n = (sum(found) / len(found) for found in (right[True], right[False]))
    return {"base_accuracy": b, "new_accuracy": n, "harmonic_mean": 2 / (1 / b + 1 / n) if b * n else 0.0}


def test_a_row_competes_with_the_classes_of_its_kind():
    logits = torch.tensor([[1.0, 2, 9], [3, 1, 9], [0, 5, 9], [9, 9, 1], [9, 8, 2.0]])
    labels = torch.tensor([1, 0, 0, 2, 2])
    found = base_and_new(logits, labels, 2)
    assert found == pytest.approx({"base_accuracy": 2 / 3, "new_accuracy": 1.0, "harmonic_mean": 0.8})
    assert base_and_new(logits[:3], labels[:3], 2) == pytest.approx(
        {"base_accuracy": 2 / 3, "new_accuracy": None, "harmonic_mean": None}
    )
    four = torch.eye(4)[[1, 0, 3, 2]]
    assert base_and_new(four, torch.arange(4), 2)["harmonic_mean"] == 0.0
    assert base_and_new(four, torch.tensor([1, 0, 3, 3]), 2) == pytest.approx(
        {"base_accuracy": 1.0, "new_accuracy": 0.5, "harmonic_mean": 2 / 3}
    )


@pytest.mark.sample("zero_shot-None", "fedavg-lora")
@pytest.mark.parametrize(("name", "adaptation"), MODELS)
def test_every_model_is_scored_on_base_and_new_rows(place, name, adaptation, tmp_path):
    details = fedfm.run(tables(place, name, adaptation), tmp_path / "run")["details"]
    split = json.loads((tmp_path / "run/manifest.json").read_text())["split"]
    for counts in split["clients"].values():
        assert counts["train"]["by_class"][2:] == [0, 0, 0]
    assert min(split["test"]["by_class"]) > 0
    models = sorted(split["clients"]) if name in ("fedpgp", "fedms") else [None]
    found = [by_hand(place, tmp_path / "run", client) for client in models]
    for key in ("base_accuracy", "new_accuracy", "harmonic_mean"):
        assert details[key] == pytest.approx(np.mean([m[key] for m in found]))
        if models != [None]:
            said = [details["client_base_and_new"][client][key] for client in models]
            assert said == pytest.approx([m[key] for m in found])
    assert ("client_base_and_new" in details) == (models != [None])


def test_the_notice_the_report_and_the_table_tell_it(place, tmp_path):
    details = fedfm.run(tables(place), tmp_path / "run")["details"]
    notices = json.loads((tmp_path / "run/manifest.json").read_text())["notices"]
    new = int((np.load(place / "rows.npz")["y"][:120] >= 2).sum())
    assert (
        f'model.base_classes = 2: {new} training rows of new classes are left out ("bird", "cow", "photo")' in notices
    )
    head, _, row = compare.table([tmp_path / "run"]).splitlines()
    for column in ("base", "new", "harmonic mean"):
        assert column in head
    assert f"{details['harmonic_mean']:.4f}" in row
    assert "harmonic mean of" in write_report(tmp_path / "run").read_text()


def test_without_the_key_nothing_is_reported(place, tmp_path):
    given = tables(place)
    del given["model"]["base_classes"]
    assert "base_accuracy" not in fedfm.run(given, tmp_path / "run")["details"]
    assert "harmonic mean" not in compare.table([tmp_path / "run"])


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({}, {"base_classes": 5}, r"model\.base_classes = 5: expected fewer than the 5 classes"),
        ({}, {"task": "classification"}, r'model\.base_classes belongs to task "zero_shot", and the task is "classif'),
        ({"base_classes": 2}, {}, r"data\.base_classes: unknown key \(did you mean model\.base_classes\?\)"),
    ],
)
def test_unsuitable_base_classes_are_refused(place, tmp_path, data, model, message):
    with pytest.raises(InputError, match=message):
        fedfm.run(tables(place, data=data, **model), tmp_path / "run")


def test_a_key_of_a_task_that_no_data_imply_needs_the_task(place, tmp_path):
    given = tables(place)
    del given["model"]["task"]
    with pytest.raises(
        InputError, match=r'base_classes belongs to task "zero_shot", which no data imply; set model\.t'
    ):
        fedfm.run(given, tmp_path / "run")
