"""Rows to predict are compared with what a run has recorded of its training rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedfm
import small
from fedfm.api.predict import predict
from fedfm.data.load import load_table
from fedfm.data.rows_to_predict import read_inputs
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError


def vectors(path: Path, x: np.ndarray, **more: Any) -> Path:
    np.savez(path, x=x.astype(np.float32), y=np.arange(len(x)) % 2, **more)
    return path


def notices_for(trained: Path, now: Path, kind: str, **spec: Any) -> str:
    """The notices of rows to predict, but not of themselves."""
    table = load_table(DataSpec(path=str(trained), **spec), seed=0)
    profile = json.loads(json.dumps(table.profile))
    plain = read_inputs(now, DataSpec(path="x", **spec), kind=kind).notices
    found = read_inputs(now, DataSpec(path="x", **spec), kind=kind, trained=profile, classes=table.classes).notices
    return "\n".join(found[len(plain) :])


def wine() -> np.ndarray:
    import sklearn.datasets

    return np.asarray(sklearn.datasets.load_wine().data)[np.random.default_rng(0).permutation(178)]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda x: x, ""),
        (lambda x: x[:1], ""),
        (lambda x: x[:, ::-1], "another order?"),
        (lambda x: x / 1000, "other units"),
        (lambda x: x[:1] * 1000, "other units"),
        (lambda x: (x - x.mean(0)) / x.std(0), "another way"),
        (lambda x: np.column_stack([x[:, :1] * 100, x[:, 1:]]), "column x[:, 0] is usually from"),
    ],
)
def test_vectors_in_other_units_or_another_order_are_reported(change: Any, word: str, tmp_path: Path) -> None:
    x = wine()
    trained, now = vectors(tmp_path / "a.npz", x[:90]), vectors(tmp_path / "b.npz", change(x[90:]))
    found = notices_for(trained, now, "features")
    assert word in found if word else found == ""


def test_values_of_one_sign_after_training_around_zero_are_reported(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(80, 4))
    trained = vectors(tmp_path / "a.npz", x[:40])
    assert notices_for(trained, vectors(tmp_path / "b.npz", x[40:]), "features") == ""
    assert "another way" in notices_for(trained, vectors(tmp_path / "c.npz", (x[40:] + 4) / 8), "features")
    scaled = vectors(tmp_path / "d.npz", x[40:] * 1000)
    assert notices_for(trained, scaled, "features", scale="unit") == ""  # data.scale takes the units away


def test_names_of_columns_have_one_order(tmp_path: Path) -> None:
    x, names = wine(), np.array([f"c{i}" for i in range(13)])
    trained = vectors(tmp_path / "a.npz", x[:90], feature_names=names)
    assert notices_for(trained, vectors(tmp_path / "b.npz", x[90:], columns=names), "features") == ""
    assert notices_for(trained, vectors(tmp_path / "c.npz", x[90:]), "features") == ""
    with pytest.raises(InputError, match=r'column x\[:, 0\] is "c12", .* it is "c0": the columns are in another order'):
        notices_for(trained, vectors(tmp_path / "d.npz", x[90:], columns=names[::-1]), "features")
    other = vectors(tmp_path / "e.npz", x[90:], feature_names=np.array([*names[:-1], "z"]))
    with pytest.raises(InputError, match=r'missing "c12", unknown "z"'):
        notices_for(trained, other, "features")
    spec = DataSpec(clients={"north": str(trained), "south": str(other)})
    with pytest.raises(InputError, match=r'e\.npz: the columns of x are not those of the file of north: missing "c12"'):
        load_table(spec, seed=0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda x: x, ""),
        (lambda x: 255 - x, "much brighter"),
        (lambda x: np.repeat(x[..., None], 3, 3) + np.array([0, 9, 0], np.uint8), "are in colours"),
        (lambda x: x.transpose(0, 2, 1), "rows and columns exchanged"),
        (lambda x: np.kron(x, np.ones((1, 8, 8), np.uint8)), "sides of about"),
    ],
)
def test_images_of_another_form_are_reported(change: Any, word: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 80, (40, 12, 16)).astype(np.uint8)
    trained = tmp_path / "a.npz"
    np.savez(trained, x=x[:20, ..., None], y=np.arange(20) % 2)
    now = change(x[20:])
    np.savez(tmp_path / "b.npz", x=now if now.ndim == 4 else now[..., None])
    found = notices_for(trained, tmp_path / "b.npz", "image")
    assert word in found if word else found == ""


ENGLISH = [f"this was the {i}th of the letters that you have not seen" for i in range(20)]


@pytest.mark.parametrize(
    ("texts", "word"),
    [
        (ENGLISH, ""),
        ([ENGLISH[0]], ""),
        (["ok", "thanks"], ""),
        (["das war nicht die Karte, die ich mit der Post habe"] * 8, "seem to be German"),
        (["где моя карта?"], "Cyrillic letters"),
        (["我的卡在哪里"], "Chinese or Japanese letters"),
        ([t.upper() for t in ENGLISH], "have capital letters"),
        ([f"<p>{t}</p>" for t in ENGLISH], "have tags of HTML"),
    ],
)
def test_texts_that_are_written_otherwise_are_reported(texts: list[str], word: str, tmp_path: Path) -> None:
    trained, now = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    trained.write_text("\n".join(json.dumps({"text": t, "label": "ab"[i % 2]}) for i, t in enumerate(ENGLISH)))
    now.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    found = notices_for(trained, now, "text")
    assert word in found if word else found == ""


def test_a_column_that_prompts_were_made_of_is_missed(tmp_path: Path) -> None:
    rows = [{"instruction": f"add {i}", "input": f"to {i * i}", "output": f"{i + i * i}"} for i in range(12)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    bare = [{key: row[key] for key in ("instruction", "input")} for row in rows]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, bare)))
    assert notices_for(tmp_path / "a.jsonl", tmp_path / "b.jsonl", "instruction") == ""
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"prompt": row["instruction"]}) for row in rows))
    assert "no column data.input" in notices_for(tmp_path / "a.jsonl", tmp_path / "c.jsonl", "instruction")


@pytest.mark.parametrize(
    ("labels", "word"),
    [(("ham", "spam"), ""), (("ham", "eggs"), '"eggs"'), (("0", "1"), ""), (("1", "2"), '"1", "2"'), (("", ""), "")],
)
def test_labels_that_are_no_class_of_the_model_are_reported(labels: tuple[str, str], word: str, tmp_path: Path) -> None:
    def write(name: str, names: tuple[str, str]) -> Path:
        rows = [{"text": t, "label": names[i % 2]} for i, t in enumerate(ENGLISH)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        return tmp_path / name

    found = notices_for(write("a.jsonl", ("ham", "spam")), write("b.jsonl", labels), "text")
    assert word in found if word else found == ""


@pytest.mark.parametrize("private", [False, True])
def test_a_run_records_and_predictions_compare(private: bool, tmp_path: Path) -> None:
    """Under [privacy] the file that all may read says nothing of the values."""
    more = {"privacy": {"unit": "client", "target_epsilon": 50.0, "delta": 1e-3, "clip_norm": 1.0}} if private else {}
    method = {"fraction": 1.0, "rounds": 1}
    fedfm.run(small.experiment(tmp_path, method=method, **more), tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert ("profile" in manifest) != private
    rows = np.load(tmp_path / "rows.npz")["x"]
    same, other = vectors(tmp_path / "same.npz", rows[:40]), vectors(tmp_path / "other.npz", rows[:40] * 1000)
    assert "other units" not in "".join(predict(tmp_path / "run", same)["warnings"])
    assert "other units" in "".join(predict(tmp_path / "run", other)["warnings"])


def test_a_profile_tells_no_single_row() -> None:
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    from fedfm.data.profiles import profile_of

    def of(rows: np.ndarray) -> dict[str, Any]:
        return profile_of(Table("features", rows, None, (), np.full(len(rows), "train")))

    changed = x.copy()
    changed[7] = 1e6
    assert of(changed) == of(x)
