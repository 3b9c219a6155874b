"""Files in common layouts, and the notices about columns and files that are not read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.data.load import load_table
from fedfm.data.rows_to_predict import read_inputs
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table, fingerprint
from fedfm.errors import InputError

ROWS = [{"text": f"row {i} says, so", "label": "ab"[i % 2]} for i in range(10)]
SPLITS = ["train"] * 8 + ["test"] * 2


def read(path: Path, task: str | None = None, **more: Any) -> Table:
    return load_table(DataSpec(path=str(path), **more), seed=0, task=task)


def jsonl(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def delimited(mark: str, rows: Any = ROWS) -> str:
    lines = [["text", "label"], *([r["text"], r["label"]] for r in rows)]
    return "".join(mark.join(f'"{v}"' if mark in v else v for v in line) + "\n" for line in lines)


FORMS: dict[str, bytes] = {
    "a.csv": delimited(",").encode(),
    "a.csv.gz": gzip.compress(delimited(",").encode()),
    "b.csv": delimited(";").encode(),
    "c.csv": delimited("\t").encode("utf-16"),
    "d.csv": delimited("|").encode("utf-8-sig"),
    "a.tsv": delimited("\t").encode(),
    "a.tsv.gz": gzip.compress(delimited("\t").encode()),
    "a.json": json.dumps(ROWS, indent=1).encode(),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "b.json": json.dumps({"version": 2, "data": ROWS}).encode(),
    "c.json": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "a.ndjson": "".join(json.dumps(row) + "\n" for row in ROWS).encode("utf-16"),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_file_gives_the_same_table(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FORMS[name])
    table = read(tmp_path / name)
    assert list(table.inputs) == [row["text"] for row in ROWS]
    assert table.classes == ("a", "b")
    assert fingerprint(table) == fingerprint(read(jsonl(tmp_path / "same.jsonl", *ROWS)))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\0")), st.booleans()), min_size=2),
    mark=st.sampled_from([",", ";", "\t", "|"]),
)
def test_any_text_survives_any_mark(rows: list[tuple[str, bool]], mark: str, tmp_path_factory: Any) -> None:
    import csv

    kept = [("x" + text + "x", "ab"[label]) for text, label in rows]
    path = tmp_path_factory.mktemp("any") / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=mark).writerows([("text", "label"), *kept])
    assert list(read(path).inputs) == [text for text, _ in kept]


def test_a_table_of_tabs_may_have_quotes_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('text\tlabel\n"To be" or not\ta\nhe said "no\tb\n')
    table = read(tmp_path / "a.tsv")
    assert table.inputs == ['"To be" or not', 'he said "no']
    assert any("quotes" in n for n in table.notices)


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_a_folder_with_a_file_for_each_split(ending: str, tmp_path: Path) -> None:
    import pandas

    home = tmp_path / "set" / "data"
    home.mkdir(parents=True)
    (tmp_path / "set" / "README.md").write_text("about")
    parts = {"train-00000-of-00002": ROWS[:4], "train-00001-of-00002": ROWS[4:8], "test-00000-of-00001": ROWS[8:]}
    for name, rows in parts.items():
        frame = pandas.DataFrame(rows)
        if ending == "parquet":
            frame.to_parquet(home / f"{name}.parquet")
        elif ending == "csv":
            frame.to_csv(home / f"{name}.csv", index=False)
        else:
            frame.to_json(home / f"{name}.jsonl", orient="records", lines=True)
    table = read(tmp_path / "set")
    assert sorted(zip(table.inputs, table.split.tolist(), strict=True)) == sorted(
        (row["text"], split) for row, split in zip(ROWS, SPLITS, strict=True)
    )
    assert list(read_inputs(tmp_path / "set", DataSpec(), kind="text").inputs) == list(table.inputs)
    one = read(home / f"train-00000-of-00002.{ending}")
    assert len(one) == 4
    assert any("one of 2 parts" in n for n in one.notices)
    (home / f"train-00001-of-00002.{ending}").unlink()
    with pytest.raises(InputError, match="part 00001 of 2 is not in the folder"):
        read(tmp_path / "set")


def test_a_folder_of_splits_says_what_it_cannot_join(tmp_path: Path) -> None:
    jsonl(tmp_path / "a" / "train.jsonl", *ROWS)
    jsonl(tmp_path / "a" / "more.jsonl", *ROWS)
    with pytest.raises(InputError, match=r'"more\.jsonl" names no split'):
        read(tmp_path / "a")
    jsonl(tmp_path / "b" / "train.jsonl", *ROWS)
    jsonl(tmp_path / "b" / "test.jsonl", {"text": "x y"})
    with pytest.raises(InputError, match=r'test\.jsonl has no column "label", which .*train\.jsonl has'):
        read(tmp_path / "b")
    jsonl(tmp_path / "c" / "train.jsonl", *ROWS)
    jsonl(tmp_path / "c" / "validation.jsonl", *ROWS[:2])
    jsonl(tmp_path / "c" / "test.jsonl", {"text": "x y", "label": -1})
    table = read(tmp_path / "c")
    assert (len(table.rows("train")), len(table.rows("test"))) == (10, 2)
    assert any("no labels (-1)" in n for n in table.notices)
    assert any("validation rows are the test rows" in n for n in table.notices)


TALK = [("user", "say one"), ("assistant", "one"), ("user", "and two")]
INSTRUCTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "alpaca": ({"instruction": "add", "input": "1 2", "output": "3"}, ("add\n\n### Input:\n1 2", "3")),
    "alpaca without an input": ({"instruction": "add", "input": "", "output": "3"}, ("add", "3")),
    "prompt, completion": ({"prompt": "add", "completion": "3"}, ("add", "3")),
    "dolly": ({"instruction": "add", "context": "1 2", "response": "3"}, ("add\n\n### Input:\n1 2", "3")),
    "messages": (
        {"messages": [{"role": r, "content": c} for r, c in [*TALK, ("assistant", "two")]]},
        (tuple(TALK), "two"),
    ),
    "sharegpt": (
        {
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}[r], "value": c} for r, c in [*TALK, ("assistant", "two")]
            ]
        },
        (tuple(TALK), "two"),
    ),
    "messages of prompt and completion": (
        {
            "prompt": [{"role": r, "content": c} for r, c in TALK],
            "completion": [{"role": "assistant", "content": "two"}],
        },
        (tuple(TALK), "two"),
    ),
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
@pytest.mark.parametrize("task", ["instruction", None])
def test_every_layout_of_instructions(name: str, task: str | None, tmp_path: Path) -> None:
    row, expected = INSTRUCTIONS[name]
    path = jsonl(tmp_path / "a.jsonl", *[row] * 6)
    table = read(path, task)
    assert (table.kind, table.inputs[0]) == ("instruction", expected)
    assert ("read as if" in "".join(table.notices)) == (name not in ("messages",) and "alpaca" not in name)
    asked = read_inputs(path, DataSpec(), kind="instruction")
    assert asked.inputs[0] == expected


def test_preferences_of_instructions_and_inputs(tmp_path: Path) -> None:
    row = {"instruction": "add", "input": "1 2", "chosen": "3", "rejected": "4", "remark": "it is a calculator"}
    table = read(jsonl(tmp_path / "a.jsonl", *[row] * 6), "preference")
    assert table.inputs[0] == ("add\n\n### Input:\n1 2", "3", "4")
    assert any('data.prompt = "instruction"' in n for n in table.notices)
    assert any('"remark" of' in n and "not read" in n for n in table.notices)


def test_a_name_that_the_user_has_set_is_never_replaced(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *[{"prompt": "a", "completion": "b"}] * 6)
    with pytest.raises(InputError, match=r'no column "task" \(data\.instruction\)'):
        read(path, "instruction", instruction="task")
    with pytest.raises(InputError, match=r'set model\.task = "instruction"'):
        read(path, "classification")


def test_texts_lists_and_pictures_that_nothing_reads_are_named(tmp_path: Path) -> None:
    rows = [
        row | {"title": f"the title of {i}", "site": "north", "date": f"2026-01-{i + 10}", "tags": ["a"], "tools": None}
        for i, row in enumerate(ROWS)
    ]
    said = [n for n in read(jsonl(tmp_path / "a.jsonl", *rows)).notices if "not read" in n]
    assert said == [f'columns "title", "tags" of {tmp_path / "a.jsonl"} are not read']
    assert not [n for n in read(jsonl(tmp_path / "b.jsonl", *ROWS)).notices if "not read" in n]


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "answers in texts": (
        {"question": "who is it", "context": "it is me", "answers": {"text": ["me"], "answer_start": [6]}},
        "extractive question answering",
    ),
    "boxes": ({"image_id": 1, "objects": {"bbox": [[0, 0, 1, 1]], "category": [1]}}, "object detection"),
    "translation": ({"translation": {"en": "good day", "de": "guten Tag"}}, "translation"),
    "sound": ({"audio": {"array": [0.5], "sampling_rate": 16000}, "label": 1}, "sound"),
    "series": ({"target": [0.5, 1.5, 2.5]}, "lists of numbers"),
    "pairs": ({"premise": "it is so", "hypothesis": "it is not", "label": 1}, "pairs of texts"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_rows_of_another_task_are_named_with_the_way_that_has_it(name: str, tmp_path: Path) -> None:
    row, words = OTHERS[name]
    path = jsonl(tmp_path / "a.jsonl", *[row] * 6)
    for task in (None, "classification", "instruction"):
        with pytest.raises(InputError, match=rf"a\.jsonl: no column .*{words}.*fedfm\.federate"):
            read(path, task)
    with pytest.raises(InputError, match=r'several labels per row, set model[.]task = "multi_label"'):
        read(jsonl(tmp_path / "b.jsonl", {"text": "a b", "label": ["x", "y"]}))
    with pytest.raises(InputError, match=r'for numbers, set model\.task = "regression"'):
        read(jsonl(tmp_path / "b.jsonl", {"text": "a b", "label": 1.5}))


@pytest.mark.parametrize(("words", "tags"), [("tokens", "ner_tags"), ("words", "upos")])
def test_words_with_tags_under_other_names_are_named_with_their_keys(words: str, tags: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *[{words: ["a", "b"], tags: ["N", "V"]}] * 6)
    for task in (None, "classification", "instruction"):
        with pytest.raises(InputError) as refusal:
            read(path, task)
        assert f'data.tokens = "{words}", data.tags = "{tags}"' in str(refusal.value)
    named = {"tokens": words, "tags": tags}
    assert read(path, "token_classification", **named).kind == "tagged"


def test_half_a_character_is_replaced_and_its_row_is_named(tmp_path: Path) -> None:
    whole = json.dumps({"text": "fine \U0001f600 \\ud83d", "label": "a"})  # a pair, and an escaped backslash
    half = '{"text": "cut \\ud83d here", "label": "b"}'
    (tmp_path / "a.jsonl").write_text("\n".join([whole, half, whole, half]))
    (tmp_path / "a.json").write_text(f"[{whole}, {half}, {whole}, {half}]")
    for name, place in (("a.jsonl", "line 2"), ("a.json", "object 2")):
        table = read(tmp_path / name, test_fraction=0)
        assert table.inputs == ["fine \U0001f600 \\ud83d", "cut \ufffd here"] * 2
        assert sum(f"{place} (and 1 more): half a character" in n for n in table.notices) == 1


def test_metadata_of_an_image_folder_in_every_form(tmp_path: Path) -> None:
    import pandas
    from PIL import Image

    rows = [{"file_name": f"x/{i}.png", "label": "ab"[i % 2], "site": "n" if i < 3 else "s"} for i in range(6)]
    found = []
    for ending in ("csv", "jsonl", "parquet"):
        home = tmp_path / ending
        (home / "x").mkdir(parents=True)
        for i in range(6):
            Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(home / "x" / f"{i}.png")
        frame = pandas.DataFrame(rows)
        if ending == "csv":
            frame.to_csv(home / "metadata.csv", index=False)
        elif ending == "jsonl":
            frame.to_json(home / "metadata.jsonl", orient="records", lines=True)
        else:
            frame.to_parquet(home / "metadata.parquet")
        table = read(home)
        assert table.classes == ("a", "b")
        assert table.columns["site"].tolist() == ["n"] * 3 + ["s"] * 3
        assert not any("no images" in n for n in table.notices)
        found.append(fingerprint(table))
    assert len(set(found)) == 1
    (tmp_path / "csv" / "metadata.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"metadata\.csv is next to metadata\.jsonl"):
        read(tmp_path / "csv")
