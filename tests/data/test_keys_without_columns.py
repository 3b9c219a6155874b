"""A key of the [data] table that names no column is refused in every format, since other rows would be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError

KEYS = ("text", "image", "label", "label_name", "split")


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"w{i},{'ab'[i % 2]}\n" for i in range(20)))
    np.savez(tmp_path / "a.npz", x=np.eye(20), y=np.arange(20) % 2)
    for i in range(20):
        file = tmp_path / "pictures" / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 10 * i, np.uint8)).save(file)
    return {name: tmp_path / name for name in ("a.csv", "a.npz", "pictures")}


@pytest.mark.parametrize("name", ["a.csv", "a.npz", "pictures"])
@pytest.mark.parametrize("key", ["label", "split"])
def test_a_misspelt_column_is_refused(name: str, key: str, sources: dict[str, Path]) -> None:
    """Without the refusal, folders were the classes, y the labels, and test rows were drawn."""
    with pytest.raises(InputError, match=f"data.{key}"):
        load_table(DataSpec(path=str(sources[name]), **{key: "misspelt"}), seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_a_column_is_checked_in_a_table(key: str, sources: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=f"data.{key}"):
        load_table(DataSpec(path=str(sources["a.csv"]), **{key: "misspelt"}), seed=0)  # type: ignore[arg-type]


def test_data_split_names_an_array_of_npz(tmp_path: Path) -> None:
    part = np.array(["train"] * 12 + ["test"] * 8)
    np.savez(tmp_path / "a.npz", x=np.eye(20), y=np.arange(20) % 2, part=part)
    table = load_table(DataSpec(path=str(tmp_path / "a.npz"), split="part"), seed=0)
    assert table.split.tolist() == part.tolist()
    assert "part" not in table.columns


def folder_of_splits(root: Path, layout: str, column: str) -> Path:
    """Rows in folders or files named after splits, with a column of splits, whose values end with ``column``."""
    for split in ("train", "test"):
        rows = [(f"{split}{i}", "ab"[i % 2], column or split) for i in range(6)]
        if layout == "tables":
            lines = "".join(f"text {name},{label},{mark}\n" for name, label, mark in rows)
            (root / f"{split}.csv").write_text("text,label,split\n" + lines)
            continue
        (root / split / "a").mkdir(parents=True)
        for i, (name, _, _) in enumerate(rows):
            Image.fromarray(np.full((8, 8, 3), 10 * i + len(split), np.uint8)).save(root / split / "a" / f"{name}.png")
        lines = "".join(f"a/{name}.png,{label},{mark}\n" for name, label, mark in rows)
        (root / split / "metadata.csv").write_text("file_name,label,split\n" + lines)
    return root


@pytest.mark.parametrize("layout", ["tables", "pictures"])
@pytest.mark.parametrize("column", ["", "test"])
def test_a_column_of_splits_that_contradicts_the_files_is_named(layout: str, column: str, tmp_path: Path) -> None:
    table = load_table(DataSpec(path=str(folder_of_splits(tmp_path, layout, column))), seed=0)
    assert sorted(table.split.tolist()) == ["test"] * 6 + ["train"] * 6
    said = [text for text in table.notices if "another split for 6 of 12 rows" in text]
    assert len(said) == bool(column)


@pytest.mark.parametrize("layout", ["tables", "pictures"])
def test_a_misspelt_split_is_refused_where_files_give_the_splits(layout: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.split"):
        load_table(DataSpec(path=str(folder_of_splits(tmp_path, layout, "")), split="misspelt"), seed=0)
