"""Files of tasks that were silently read as something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny_text
from fedfm.core import tasks
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.models.load import load_model
from fedfm.models.spec import ModelSpec
from fedfm.tasks._tagged_rows import forewarnings

SENTENCES = [[("Anna", "B-PER"), ("Smith", "I-PER"), (f"ran{i}", "O")] for i in range(12)]


def conll(path: Path, end: str = "\n", sentences: list[list[tuple[str, str]]] = SENTENCES) -> Table:
    path.write_bytes((end * 2).join(end.join(" ".join(pair) for pair in of) for of in sentences).encode())
    return load_table(DataSpec(path=str(path), test_fraction=0.0), seed=0, task="token_classification")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_end_of_a_line_ends_a_word(end: str, tmp_path: Path) -> None:
    table = conll(tmp_path / "a.conll", end)
    assert table.inputs == [tuple(zip(*of, strict=True)) for of in SENTENCES]
    assert not table.notices


def test_tags_before_words_are_doubted(tmp_path: Path) -> None:
    table = conll(tmp_path / "a.conll", sentences=[[(tag, word) for word, tag in of] for of in SENTENCES])
    assert any("14 different entries, and the column of words 3" in text for text in table.notices)


def test_types_of_entities_that_differ_by_case_are_named(tmp_path: Path) -> None:
    """B-PER and I-Per are no two spellings of a tag, but no entity has both."""
    spec = ModelSpec(str(tiny_text.save_bert(tmp_path / "bert")), max_length=8)
    classes = ("O", "B-PER", "I-PER")
    model = load_model(spec, classes=classes, kind="tagged", task=tasks.find("token_classification"))
    mixed = [[(word, tag.replace("I-PER", "I-Per")) for word, tag in of] for of in SENTENCES]
    for sentences, wrong in ((SENTENCES, False), (mixed, True)):
        found = forewarnings({"training": conll(tmp_path / "a.conll", sentences=sentences)}, model.tools)
        assert any('types "PER" and "Per" differ only by case' in text for text in found) == wrong


def test_blanks_after_a_separator_of_labels_are_no_spellings(tmp_path: Path) -> None:
    rows = [{"text": f"w{i}", "label": ["a; b", "b;a", "b"][i % 3]} for i in range(12)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = load_table(DataSpec(path=str(tmp_path / "a.jsonl"), test_fraction=0.0), seed=0, task="multi_label")
    assert table.classes == ("a", "b")
    assert not any("blanks at their ends" in text for text in table.notices)


def test_answers_that_differ_by_blanks_teach_nothing(tmp_path: Path) -> None:
    rows = [{"prompt": f"q {i}", "chosen": f"a b {i}", "rejected": f"a  b {i} "} for i in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = load_table(DataSpec(path=str(tmp_path / "a.jsonl"), test_fraction=0.0), seed=0, task="preference")
    assert any("in 4 of 4 rows, chosen and rejected are the same answer" in text for text in table.notices)
