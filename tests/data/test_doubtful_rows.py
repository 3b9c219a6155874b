"""Files whose text has two possible readings are refused, or a notice names the reading."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedfm.data.load import load_table
from fedfm.data.pictures import decode
from fedfm.data.repetitions import notices
from fedfm.data.rows_to_predict import read_inputs
from fedfm.data.similar_names import spellings
from fedfm.data.sources import csv, json, jsonl
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError

TEXTS = [f"text {i} of {i * i}" for i in range(40)]


def write(path: Path, rows: list[str], head: str = "text,label") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def notices_for(path: Path, **more: Any) -> str:
    return "\n".join(load_table(DataSpec(path=str(path), **more), seed=0).notices)


def rows(texts: list[str] = TEXTS, mark: str = ",") -> list[str]:
    return [f"{text}{mark}{'ab'[i % 2]}" for i, text in enumerate(texts)]


@pytest.mark.parametrize("mark", [",", ";"])
def test_quotes_behind_blanks_are_marks(mark: str) -> None:
    data = f'text{mark} label\none{mark} "a"\n"x{mark} y"{mark}   "b"\n'.encode()
    sheet = csv.sheet_of(data, Path("a.csv"))
    assert sheet.columns == {"text": ["one", f"x{mark} y"], "label": ["a", "b"]}
    assert "blanks between" in sheet.notices[0]


@pytest.mark.parametrize("cell", ['"He said, ""no"""', "good, indeed".join('""'), ' "no" he said'])
def test_other_quotes_stay(cell: str) -> None:
    sheet = csv.sheet_of(f"text,label\n{cell},a\n".encode(), Path("a.csv"))
    assert sheet.columns["text"] == [cell[1:-1].replace('""', '"') if cell.startswith('"') else cell]
    assert not sheet.notices


@pytest.mark.parametrize("close", [6, 7, 9])
def test_a_stray_quote_takes_no_rows(close: int) -> None:
    lines = rows(mark="\t")
    lines[5], lines[close] = '"one\ta', 'two"\tb'
    tabs = csv.sheet_of_tabs("\n".join(["text\tlabel", *lines]).encode(), Path("a.tsv"))
    assert len(tabs) == len(TEXTS)
    assert tabs.columns["text"][5] == '"one'
    commas = csv.sheet_of(
        "\n".join(["text,label", *(line.replace("\t", ",") for line in lines)]).encode(), Path("a.csv")
    )
    assert "a.csv, row 7" in commas.notices[0]
    whole = csv.sheet_of(b'text,label\n"first line,\nand, so on\nlast",a\nb,b\n', Path("a.csv"))
    assert not whole.notices
    lines = csv.sheet_of_tabs(b'text\tlabel\n"one\ta\nand more\nlast"\tb\nx\ta\n', Path("a.tsv"))
    assert lines.columns["text"] == ["one\ta\nand more\nlast", "x"]
    assert "a.tsv, row 2" in lines.notices[0]


def test_names_of_columns_are_no_row() -> None:
    with pytest.raises(InputError, match=r"a.csv, row 3 \(line 4\) repeats the column names"):
        csv.sheet_of(b'text,label\n"a\nb",x\ntext,label\n', Path("a.csv"))
    assert csv.sheet_of(b"text\na\ntext\n", Path("a.csv")).columns == {"text": ["a", "text"]}


@pytest.mark.parametrize("value", ['{"text": "a", "label": "b", "text": "c"}', '{"m": [{"a": 1, "a": 1}]}'])
def test_a_key_occurs_once(value: str) -> None:
    for read, data in ((jsonl.sheet_of, value), (json.sheet_of, f"[{value}]"), (json.sheet_of, value)):
        with pytest.raises(InputError, match="occurs 2 times in one object"):
            read(data.encode(), Path("a"))


@given(st.lists(st.tuples(st.integers(0, 29), st.integers(0, 1)), min_size=20, max_size=60))
@settings(max_examples=30, deadline=None)
def test_repeated_and_contradicting_rows_are_counted(drawn: list[tuple[int, int]]) -> None:
    x = np.zeros((len(drawn), 300), np.float32)
    x[:, -1] = [i for i, _ in drawn]  # equal but for the last number
    texts = [f"row {i}" for i, _ in drawn]
    labels = np.array([label for _, label in drawn])
    again = len(drawn) - len(set(texts))
    several = {i for i, n in Counter(i for i, _ in set(drawn)).items() if n > 1}
    against = sum(i in several for i, _ in drawn)
    for kind, inputs in (("features", x), ("text", texts)):
        table = Table(kind, inputs, labels, ("a", "b"), np.full(len(drawn), "train"))
        found = " ".join(notices(table))
        assert (f"{again} of {len(drawn)} training rows repeat" in found) == (again >= 0.1 * len(drawn) and again > 0)
        assert (f"{against} of {len(drawn)} training rows have an equal" in found) == (against > 0)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_rows_of_several_clients(tmp_path: Path, ending: str) -> None:
    write(tmp_path / "a.csv", rows())
    lines = [f'{{"text": "{text}", "label": "{"ab"[i % 2]}"}}' for i, text in enumerate(TEXTS)]
    other = write(tmp_path / f"b.{ending}", *((rows(),) if ending == "csv" else (lines[1:], lines[0])))
    table = load_table(DataSpec(clients={"north": str(tmp_path / "a.csv"), "south": str(other)}), seed=0)
    assert any("north and south have" in text for text in table.notices)


def test_files_that_make_one_split_are_named(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.csv", rows())
    write(tmp_path / "d" / "test.csv", rows([f"new {text}" for text in TEXTS]))
    assert not notices_for(tmp_path / "d")
    write(tmp_path / "d" / "train_old.csv", rows([f"old {text}" for text in TEXTS]))
    assert "train rows of" in notices_for(tmp_path / "d")
    assert '"train.csv", "train_old.csv"' in notices_for(tmp_path / "d")


@pytest.mark.parametrize("word", ["nan", "NaN", "<NA>", "NULL", " n/a ", r"\N"])
def test_texts_of_empty_cells(tmp_path: Path, word: str) -> None:
    assert "1 texts of" in notices_for(write(tmp_path / "a.csv", rows([*TEXTS, word])))
    assert not notices_for(write(tmp_path / "a.csv", rows([*TEXTS, f"{word} of it"])))


def test_values_of_where_that_are_alike(tmp_path: Path) -> None:
    lines = [f"{row},{'en' if i % 4 else 'En '}" for i, row in enumerate(rows())]
    path = write(tmp_path / "a.csv", lines, "text,label,lang")
    assert '10 rows with "En "' in notices_for(path, where={"lang": ("en",)})
    assert "left out" not in notices_for(path, where={"lang": ("en", "En ")})


def test_test_rows_of_one_class(tmp_path: Path) -> None:
    lines = [f"{row},{'train' if i % 4 else 'test'}" for i, row in enumerate(rows())]
    assert 'all test rows are of one class, "a"' in notices_for(write(tmp_path / "a.csv", lines, "text,label,split"))


def test_thousands_are_no_fractions(tmp_path: Path) -> None:
    lines = [f"{text};{('1,000', '2,000', '1')[i % 3]}" for i, text in enumerate(TEXTS)]
    table = load_table(DataSpec(path=str(write(tmp_path / "a.csv", lines, "text;label"))), seed=0)
    assert table.classes == ("1", "1,000", "2,000")
    assert not any("several labels" in text for text in table.notices)


@given(st.text("äéüßΩж", min_size=1, max_size=5))
def test_names_that_were_decoded_otherwise(name: str) -> None:
    for encoding in ("cp1252", "latin-1"):
        try:
            other = f"x{name}".encode().decode(encoding)
        except UnicodeDecodeError:
            continue
        assert any("another encoding" in text for text in spellings([f"x{name}", other, "y"]))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda x: (x > 127).astype(np.uint8), "no value above 1 (of 255)"),
        (lambda x: x // 16, "no value above 15 (of 255)"),
        (lambda x: np.where(np.arange(len(x))[:, None, None, None] % 2, x, 7).astype(np.uint8), "one colour"),
        (lambda x: x, ""),
    ],
)
@pytest.mark.parametrize("files", [False, True])
def test_pictures_of_other_numbers(tmp_path: Path, change: Any, word: str, files: bool) -> None:
    x = change(np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3)).astype(np.uint8))
    path = tmp_path / ("d" if files else "a.npz")
    if files:
        for i, pixels in enumerate(x):
            (path / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path / "ab"[i % 2] / f"{i}.png")
    else:
        np.savez(path, x=x, y=np.arange(20) % 2)
    found = notices_for(path), "\n".join(read_inputs(path, DataSpec(path=str(path)), kind="image").notices)
    assert all(word in text if word else not text for text in found)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_grey_that_counts_from_white(tmp_path: Path, dtype: Any) -> None:
    top = np.iinfo(dtype).max
    values = np.array([[0, top // 4, top]], dtype=dtype)
    stored = values if dtype == np.uint16 else values[:, ::1]
    Image.fromarray(stored).save(tmp_path / "a.tif", tiffinfo={262: 0})
    found = decode(tmp_path / "a.tif")[0, :, 0]
    # Pillow inverts 8 bits both when it writes and when it reads; 16 bits lie in the file as they are.
    assert found.tolist() == ([255, 255 - 64, 0] if dtype == np.uint16 else [0, 63, 255])


@pytest.mark.parametrize("names", [["neg", "pos"], ["pos", "neg"]])
def test_splits_of_a_hub_set_name_classes_alike(tmp_path: Path, names: list[str]) -> None:
    datasets = pytest.importorskip("datasets")

    def part(names: list[str]) -> Any:
        kinds = {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
        rows = {"text": TEXTS, "label": [i % 2 for i in range(len(TEXTS))]}
        return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))

    datasets.DatasetDict({"train": part(["neg", "pos"]), "test": part(names)}).save_to_disk(tmp_path / "hub")
    spec = DataSpec(hub=str(tmp_path / "hub"))
    if names == ["neg", "pos"]:
        assert load_table(spec, seed=0).classes == ("neg", "pos")
    else:
        with pytest.raises(InputError, match=r'"train" and "test" of .* name the classes of "label" differently'):
            load_table(spec, seed=0)
