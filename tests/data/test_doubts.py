"""Notices about rows that look like a mistake, and none about other rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedfm.data.doubts import doubts
from fedfm.data.load import load_table
from fedfm.data.partition import deal
from fedfm.data.similar_names import spellings
from fedfm.data.spec import DataSpec, PartitionSpec


@pytest.mark.parametrize(
    ("names", "alike"),
    [
        (["False", "True", "0", "1"], '"0" and "False"; "1" and "True"'),
        (["no", "yes", "FALSE", "TRUE"], '"FALSE" and "no"; "TRUE" and "yes"'),
        (["false", "1.0"], ""),
        (["0", "1", "yes"], '"1" and "yes"'),
        (["a", "t", "y", "1"], ""),
    ],
)
def test_true_and_false_have_many_spellings(names: list[str], alike: str) -> None:
    found = [text for text in spellings(names) if "true and false" in text]
    assert found == (
        [f"the classes {alike} differ only by how they write true and false; if they are one class, spell them alike"]
        if alike
        else []
    )


def test_the_names_of_clients_are_compared_like_those_of_classes(tmp_path: Path) -> None:
    sites = ["Berlin", "berlin ", "nan", "Paris"]
    rows = [f"text {i},{i % 2},{sites[i % 4]}" for i in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label,site", *rows]))
    spec = DataSpec(path=str(tmp_path / "a.csv"), partition=PartitionSpec("by_column", column="site"))
    names = list(deal(load_table(spec, seed=0), spec, seed=0).clients)
    first, second = spellings(names, "client")
    assert (
        first
        == 'the clients "Berlin" and "berlin" differ only by case or spaces; if they are one client, spell them alike'
    )
    assert second.startswith('the client "nan" is trained like any other; if it marks rows without a client')


@pytest.mark.parametrize(("first", "second", "told"), [("01", "no", True), ("01", "12", False), ("ab", "cd", False)])
def test_numbers_at_one_client_and_names_at_another_are_reported(
    first: str, second: str, told: bool, tmp_path: Path
) -> None:
    for name, labels in (("a", first), ("b", second)):
        rows = [f"{name} {i},{labels[i % 2]}" for i in range(20)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    spec = DataSpec(clients={name: str(tmp_path / f"{name}.csv") for name in "ab"})
    assert told == any('of "a" are numbers and those of "b" are names' in n for n in load_table(spec, seed=0).notices)


def notices_for(labels: list[Any], tmp_path: Path) -> str:
    """The notices on texts with these labels, none of which is twice."""
    rows = [{"text": f"row {i}", "label": label} for i, label in enumerate(labels)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = load_table(DataSpec(path=str(tmp_path / "a.jsonl")), seed=0)
    return "\n".join(doubts(table, "label"))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([20 + i % 60 for i in range(240)], "60 different numbers from 20 to 79.*quantity.*regression"),
        ([f"{i % 7 / 2}" for i in range(70)], "7 different numbers from 0 to 3"),
        ([i % 30 for i in range(240)], ""),
        ([1 + i % 30 for i in range(240)], ""),
        ([5, 10, 20] * 20, ""),
        (["heart;lung", "lung", "heart", "heart;liver"] * 9, r'1 of 4 classes .*"heart;lung"'),
        (["a|b", "b|c", "c|a"] * 9, "3 of 3 classes"),
        (["heart and lung", "lung", "heart", "skin"] * 9, '1 of 4 classes .*"heart and lung"'),
        (["heart lung", "lung", "heart", "skin"] * 9, '1 of 4 classes .*"heart lung"'),
        (["red apple", "green apple", "red pear", "green pear"] * 9, ""),
        ([f"{i % 30},5" for i in range(240)], "30 different numbers from 0.5 to 29.5.*quantity"),
        ([f"{i % 30} %" for i in range(240)], "30 different numbers from 0 to 29.*quantity"),
        ([f"1,{i % 30:03d}" for i in range(240)], "30 different numbers from 1000 to 1029.*quantity"),
        ([f"{i % 30}.25 mg/l" for i in range(240)], "30 different numbers from 0.25 to 29.25.*quantity"),
        (["5 mg", "10 mg", "20 mg"] * 20, ""),
        ([f"2024-01-{1 + i % 28:02d}" for i in range(240)], '28 different dates or times, such as "2024-01-01"'),
        ([f"{1 + i % 28}.1.2024" for i in range(240)], "28 different dates"),
        ([f"1{i % 2}:30" for i in range(40)], '2 different dates or times, such as "10:30"'),
        (['["x", "y"]', '["x"]', '["y"]'] * 9, "1 of 3 classes"),
        (["animals/dog", "animals/cat", "plants/oak"] * 9, ""),
        (["Rock, Paper", "Scissors", "Rock"] * 9, ""),
        ([f"name {i}" for i in range(40)], "40 different labels in 40 rows"),
        (["a", "b"] * 20, ""),
        (["x" * 300, "y"] * 20, "300 characters"),
    ],
)
def test_classes_that_are_none(labels: list[Any], words: str, tmp_path: Path) -> None:
    import re

    found = notices_for(labels, tmp_path)
    assert re.search(words, found) if words else not found


@pytest.mark.parametrize(
    "hidden", ["\u200b", "\u200d", "\ufeff", "\u00ad", "\u2060", "\u200e", "\ufe0f", "\u3164", "\u2063", "\x07"]
)
def test_names_that_differ_in_what_nobody_sees_are_named_with_its_code(hidden: str) -> None:
    (note,) = spellings(["neg", "neg" + hidden, "pos"])
    assert f'"neg\\u{ord(hidden):04x}"' in note
    assert "differ only by invisible characters" in note


@pytest.mark.parametrize("end", ["first", "last", "middle"])
@pytest.mark.parametrize("several", [False, True])
def test_a_row_of_units_or_totals_is_named(end: str, several: bool, tmp_path: Path) -> None:
    """At either end of a file, also of a client's own file."""
    rows = [f"text {i},{'ab'[i % 2]}" for i in range(40)]
    (tmp_path / "b.csv").write_text("\n".join(["text,label", *rows]))
    rows.insert({"first": 0, "last": 40, "middle": 20}[end], "Total,40")
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows]))
    clients = {name: str(tmp_path / f"{name}.csv") for name in "ab"}
    spec = DataSpec(clients=clients) if several else DataSpec(path=clients["a"])
    found = [text for text in load_table(spec, seed=0).notices if "alone has the class" in text]
    assert [f"the {end} row of" in text and '"40"' in text for text in found] == ([] if end == "middle" else [True])


@pytest.mark.parametrize(
    ("names", "changed"),
    [
        (("1-Mar", "TP53"), '"1-Mar"'),
        (("Sep-02", "Mar-01"), '"Mar-01", "Sep-02"'),
        (("01. Mrz", "BRCA1"), '"01. Mrz"'),
        (("2.00E+05", "2E5"), '"2.00E+05"'),
        (("MARCH1", "2e5", "May", "B-1", "10-50", "Mar-a", "stage-1"), ""),
    ],
)
def test_names_that_a_spreadsheet_changed_are_named(names: tuple[str, ...], changed: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *(f"row {i},{names[i % len(names)]}" for i in range(70))]))
    found = [
        text for text in load_table(DataSpec(path=str(tmp_path / "a.csv")), seed=0).notices if "spreadsheet" in text
    ]
    assert [f'column "label" holds {changed}:' in text for text in found] == ([True] if changed else [])


def test_the_empty_cell_of_mysql_is_no_class() -> None:
    (note,) = spellings(["\\N", "neg", "pos"])
    assert note.startswith('the class "\\N" is trained like any other')


@pytest.mark.parametrize("limit", [None, 10, 60])
def test_the_built_in_images_give_no_notice(limit: int | None) -> None:
    """So they are not examined in each run."""
    table = load_table(DataSpec(name="digits", limit=limit), seed=0)
    assert table.notices == doubts(table, "label") == ()
