"""Notices of rows that are probably not what was meant, and of rows that were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedfm.data.doubts import doubts
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.runtime.description import spellings


def said(labels: list[Any], tmp_path: Path) -> str:
    """The notices on texts with these labels, none of which is twice."""
    rows = [{"text": f"row {i}", "label": label} for i, label in enumerate(labels)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = load_table(DataSpec(path=str(tmp_path / "a.jsonl")), seed=0)
    return "\n".join(doubts(table, "label"))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([20 + i % 60 for i in range(240)], "60 different numbers from 20 to 79.*quantity.*federate"),
        ([f"{i % 7 / 2}" for i in range(70)], "7 different numbers from 0 to 3"),
        ([i % 30 for i in range(240)], ""),
        ([1 + i % 30 for i in range(240)], ""),
        ([5, 10, 20] * 20, ""),
        (["heart;lung", "lung", "heart", "heart;liver"] * 9, r'1 of 4 classes .*"heart;lung"'),
        (["a|b", "b|c", "c|a"] * 9, "3 of 3 classes"),
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

    found = said(labels, tmp_path)
    assert re.search(words, found) if words else not found


@pytest.mark.parametrize(
    "hidden", ["\u200b", "\u200d", "\ufeff", "\u00ad", "\u2060", "\u200e", "\ufe0f", "\u3164", "\u2063", "\x07"]
)
def test_names_that_differ_in_what_nobody_sees_are_named_with_its_code(hidden: str) -> None:
    (note,) = spellings(["neg", "neg" + hidden, "pos"])
    assert f'"neg\\u{ord(hidden):04x}"' in note
    assert "differ by invisible characters alone" in note
