"""Columns and files that describe the rows and are not read; clients and classes that do not match."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec, PartitionSpec

LABELS = ("a", "b")


def write(path: Path, labels: Sequence[Any] = LABELS, rows: int = 60, of: str = "text", **columns: Any) -> Path:
    """A file of texts; a further column is a function of the row's index."""
    lines = [
        {"text": f"{of} {i} about {i * i}", "label": labels[i % len(labels)]}
        | {name: value(i) for name, value in columns.items()}
        for i in range(rows)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def notices_for(path: Path, task: str | None = None, **more: Any) -> str:
    return "\n".join(load_table(DataSpec(path=str(path), **more), seed=0, task=task).notices)


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("fold", lambda i: i % 5, "seems to number parts"),
        ("kfold", lambda i: f"fold_{i % 5}", "seems to number parts"),
        ("partition", lambda i: "AB"[i // 30], "seems to number parts"),
        ("subset", lambda i: float(i // 1500), "seems to number parts"),  # sorted
        ("set", lambda i: ("train", "test")[i // 1500], "seems to mark training and test rows"),
        ("set", lambda i: ("north", "south")[i % 2], ""),
        ("fold", lambda i: i, ""),
        ("dataset", lambda i: i % 5, ""),
        ("hospital", lambda i: f"h{i % 4}", "seems to name 4 clients"),
        ("site_id", lambda i: i % 3, "seems to name 3 clients"),
        ("client", lambda i: i, ""),
        ("site", lambda i: "one", ""),
        ("patient_id", lambda i: f"p{i // 4}", "test rows were drawn without regard to it"),
        ("Speaker", lambda i: i % 40, "test rows were drawn without regard to it"),
        ("patient_id", lambda i: i, ""),
    ],
)
def test_a_column_that_splits_the_rows_is_reported(name: str, value: Any, word: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows=3000 if "sub" in name or value(0) == "train" else 60, **{name: value})
    found = notices_for(path)
    assert word in found if word else found == ""
    if word and "parts" not in word:  # a column by which rows are dealt is read
        assert word not in notices_for(path, partition=PartitionSpec("by_column", column=name))


def test_patients_who_are_kept_apart_say_nothing(tmp_path: Path) -> None:
    marks = {"patient": lambda i: f"p{i // 6}", "split": lambda i: "test" if i < 12 else "train"}
    assert notices_for(write(tmp_path / "a.jsonl", **marks)) == ""


@pytest.mark.parametrize(
    ("name", "told"), [("test.xlsx", True), ("test.arrow", True), ("test.dat", True), ("README.md", False)]
)
def test_files_next_to_those_that_are_read_are_reported(name: str, told: bool, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl")
    (tmp_path / name).write_bytes(b"x")
    (tmp_path / "train.py").write_bytes(b"x")
    assert (f'"{name}" in' in notices_for(tmp_path)) == told


@pytest.mark.parametrize(
    ("labels", "told"),
    [((0, 1, "neg", "pos"), True), (("1", "2", "3", "unknown"), False), ((0, 1), False), (("no", "yes", 1), False)],
)
def test_numbers_among_names_of_classes_are_reported(labels: tuple[Any, ...], told: bool, tmp_path: Path) -> None:
    assert ("holds numbers" in notices_for(write(tmp_path / "a.jsonl", labels))) == told


@pytest.mark.parametrize(
    ("north", "south", "word"),
    [
        ((0, 1, 2), (1, 2, 3), "are 0 to 2 and those of"),
        (("cat", "dog"), ("Katze", "Hund"), "no two clients have a class in common"),
        (("cat", "dog"), ("cat", "Hund"), ""),
        ((0, 1, 2), (0, 1), ""),
        ((0, 1, 2), (1, 2), ""),
        (("cat",), ("dog",), ""),
    ],
)
def test_classes_of_clients_that_do_not_fit_are_reported(
    north: tuple[Any, ...], south: tuple[Any, ...], word: str, tmp_path: Path
) -> None:
    files = {
        "north": str(write(tmp_path / "n.jsonl", north)),
        "south": str(write(tmp_path / "s.jsonl", south, of="word")),
    }
    found = "\n".join(
        text
        for text in load_table(DataSpec(clients=files), seed=0).notices
        if "become the class names" not in text and "one class" not in text.replace("are one class", "")
    )
    assert word in found if word else "clients have" not in found and "are 0 to" not in found


@pytest.mark.parametrize(
    ("change", "word"), [(lambda x: x, ""), (lambda x: x[:, ::-1], "another order?"), (lambda x: x * 30, "other units")]
)
def test_clients_whose_vectors_differ_are_reported(change: Any, word: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, of in (("n", lambda x: x), ("s", change)):
        x = rng.normal(size=(60, 5)) + 10 * np.arange(5)
        np.savez(tmp_path / f"{name}.npz", x=of(x).astype(np.float32), y=rng.integers(0, 3, 60))
    spec = DataSpec(clients={name: str(tmp_path / f"{name}.npz") for name in "ns"})
    found = "\n".join(load_table(spec, seed=0).notices)
    assert word in found if word else found == ""


def test_channels_that_are_read_as_height_are_reported(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (30, 1, 28, 3)).astype(np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(30) % 2)
    assert "1 pixels high: if this axis has the channels" in notices_for(tmp_path / "a.npz")


@pytest.mark.parametrize("what", ["cmyk", "mask", "plain"])
def test_colours_of_print_and_masks_among_images_are_reported(what: str, tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        cells = np.random.default_rng(i).integers(0, 256, (4, 4, 3)).repeat(8, 0).repeat(8, 1)
        picture, file = Image.fromarray(cells.astype(np.uint8)), io.BytesIO()
        (picture.convert("CMYK") if what == "cmyk" else picture).save(file, "JPEG")
        (tmp_path / "ab"[i % 2] / f"case ({i}).jpg").write_bytes(file.getvalue())
        if what == "mask":
            picture.convert("L").point(lambda v: 255 * (v > 99)).save(tmp_path / "ab"[i % 2] / f"case ({i})_mask.png")
    found = notices_for(tmp_path)
    assert ("converted to RGB without their colour profile" in found) == (what == "cmyk")
    assert ("12 images, such as" in found and "masks of other images" in found) == (what == "mask")
    assert found == "" or what != "plain"


@pytest.mark.parametrize(
    ("column", "value", "word"),
    [
        ("label", lambda i: i % 3 > 0, "reject 10 of 30 answers"),
        ("accepted", lambda i: ("no", "yes")[i % 2], "reject 15 of 30 answers"),
        ("rating", lambda i: i % 5, "grade the answers"),
        ("label", lambda i: ("sports", "news")[i % 2], ""),
        ("score", lambda i: 1.0, ""),
    ],
)
def test_answers_with_ratings_that_are_all_learned_alike_are_reported(
    column: str, value: Any, word: str, tmp_path: Path
) -> None:
    rows = [{"prompt": f"say {i} now", "completion": f"yes {i * i}", column: value(i)} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = notices_for(tmp_path / "a.jsonl")
    assert word in found if word else "answers" not in found
    if word.startswith("reject"):
        good = tuple(str(row[column]) for row in rows if str(row[column]) in ("True", "yes"))[:1]
        assert word not in notices_for(tmp_path / "a.jsonl", where={column: good})


@pytest.mark.parametrize("better", [5.0, 1.0])
def test_scores_that_speak_for_the_rejected_answer_are_reported(better: float, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"say {i}", "chosen": f"yes {i}", "rejected": f"no {i}", "score_chosen": better, "score_rejected": 3}
        for i in range(30)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = notices_for(tmp_path / "a.jsonl", "preference")
    assert ("in 30 of 30 rows" in found and "exchanged?" in found) == (better < 3)


@pytest.mark.parametrize(
    ("tags", "word"),
    [(("o", "B-X"), '"o" counts as a type of'), ((0, 1), "are numbers"), (("O", "B-X"), ""), (("NN", "VB"), "")],
)
def test_tags_without_an_outside_are_reported(tags: tuple[Any, ...], word: str, tmp_path: Path) -> None:
    rows = [{"tokens": ["a", f"b{i}"], "tags": tags} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = notices_for(tmp_path / "a.jsonl", "token_classification")
    assert word in found if word else found == ""


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Tom &amp; Jerry &#39;{}&#39;", "escapes of HTML"),
        ("a\x1b[31m red {}", "control characters"),
        ("AT&T; {} & co\n\ttab", ""),
        ("wo\u200brd {}", "invisible characters"),
        ("نمی\u200cخواهم {}", ""),
        ("[CLS] one {} [SEP]", "special tokens"),
        ("the beginning of {} ...", "three dots"),
        ("what is {}? ... and then", ""),
    ],
)
def test_texts_that_other_programs_changed_are_reported(text: str, word: str, tmp_path: Path) -> None:
    rows = [{"text": text.format(i), "label": "ab"[i % 2]} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = notices_for(tmp_path / "a.jsonl")
    assert word in found if word else found == ""


@pytest.mark.parametrize(("limit", "told"), [(255, True), (10_000, False), (90, False)])
def test_texts_that_were_cut_at_one_length_are_reported(limit: int, told: bool, tmp_path: Path) -> None:
    rows = [{"text": (f"word {i} " * (5 + i))[:limit], "label": "ab"[i % 2]} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert ("has another program cut them?" in notices_for(tmp_path / "a.jsonl")) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [("topic {own}: row {i}", True), ("row {i}", False), ("{own} and {other} {i}", False), ("{own}ish {i}", False)],
)
def test_a_label_that_is_written_into_the_texts_is_reported(text: str, told: bool, tmp_path: Path) -> None:
    names = ("cats", "dogs")
    rows = [
        {"text": text.format(own=names[i % 2], other=names[1 - i % 2], i=i), "label": names[i % 2]} for i in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert ("hold the name of their class" in notices_for(tmp_path / "a.jsonl")) == told


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{{"text": "row {i}", "label": "a"}}', "objects of JSON"),
        ("row {i},a", "rows below the names of columns"),
        ("A story, of {i}, goes on.", ""),
    ],
)
def test_a_table_that_is_read_as_running_text_is_reported(line: str, word: str, tmp_path: Path) -> None:
    head = ["text,label"] if word.startswith("rows") else []
    (tmp_path / "a.txt").write_text("\n".join([*head, *(line.format(i=i) for i in range(200))]))
    found = notices_for(tmp_path / "a.txt")
    assert word in found if word else found == ""
