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
