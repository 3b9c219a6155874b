"""Values that reading would join, round or leave out are refused, or a notice names them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedfm.data.class_names import class_name, notices_of
from fedfm.data.load import load_table
from fedfm.data.similar_names import spellings
from fedfm.data.sources._tabular import codes_of
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError


def read(path: Path) -> Table:
    return load_table(DataSpec(path=str(path), test_fraction=0.0), seed=0)


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng([seed, *size]).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


# --- labels -----------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(-(1 << 60), 1 << 60), min_size=1, max_size=8, unique=True))
def test_integers_written_as_floats_stay_different_classes_or_are_refused(labels: list[int]) -> None:
    values = [float(label) for label in labels]  # as pandas does if a value is missing
    if max(map(abs, values)) >= 1 << 53:
        with pytest.raises(InputError, match=r"from 2\^53 on"):
            codes_of(values, "label", str)
    else:
        codes, names, _ = codes_of(values, "label", str)
        assert [int(names[code]) for code in codes] == labels


def test_a_float_beyond_two_to_53_is_refused_in_a_file(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "label": [float(2**53), float(2**53 + 2)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"row 1: column \"label\" holds the floating-point number 9007199254740992.0"):
        read(tmp_path / "rows.parquet")


@given(st.lists(st.text("ab \t", max_size=4), max_size=6))
def test_a_notice_names_the_labels_that_blanks_at_the_ends_kept_apart(texts: list[str]) -> None:
    said = [text for text in notices_of(texts, "label") if "differ only by blanks" in text]
    assert bool(said) == (len(set(texts)) > len({class_name(text) for text in texts}))


@pytest.mark.parametrize(
    ("names", "how"),
    [
        (["cat", "\u0441\u0430t"], "letters of other alphabets that look alike"),
        (["Y", "yes", "N", "no"], "an abbreviation"),
        (["'a'", "a"], "marks at their ends"),
        (["lung.", "lung"], "marks at their ends"),
    ],
)
def test_likely_spellings_of_one_class_are_reported(names: list[str], how: str) -> None:
    assert any(f"differ only by {how}" in text for text in spellings(names))


@pytest.mark.parametrize("names", [["TNF-\u03b1", "TNF-a"], list("abcdefnoty"), [".5", "5"], ["?!", "!"]])
def test_names_that_are_different(names: list[str]) -> None:
    assert not spellings(names)


# --- vectors ----------------------------------------------------------------------------------------------------------
def test_a_column_that_float32_hardly_describes_is_named(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(30, 3))
    np.savez(tmp_path / "plain.npz", x=x, y=np.arange(30) % 2)
    assert not any("float32" in text for text in read(tmp_path / "plain.npz").notices)
    x[:, 1] = 1.7e9 + 3.0 * np.random.default_rng(1).permutation(30)  # seconds since 1970
    np.savez(tmp_path / "times.npz", x=x, y=np.arange(30) % 2)
    (said,) = [text for text in read(tmp_path / "times.npz").notices if "float32" in text]
    after = len(np.unique(x[:, 1].astype(np.float32)))
    assert "column x[:, 1] lies from 1700000000 to 1700000087" in said
    assert f"its 30 different values become {after}" in said


def test_a_constant_column_is_not_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.full((10, 2), 1.7e9 + 1), y=np.arange(10) % 2)
    assert not any("float32" in text for text in read(tmp_path / "a.npz").notices)


def test_two_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((4, 2)), y=np.arange(4) % 2)
    member = io.BytesIO()
    np.save(member, 1 - np.arange(4) % 2)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("y.npy", member.getvalue())
    with pytest.raises(InputError, match='several arrays "y"'):
        read(path)


def test_a_repeated_column_of_parquet_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table([["a"], ["x"], ["y"]], names=["text", "label", "label"]), tmp_path / "a.parquet")
    with pytest.raises(InputError, match='column "label" occurs 2 times'):
        read(tmp_path / "a.parquet")


# --- folders ----------------------------------------------------------------------------------------------------------
def test_joined_folders_of_one_class_are_reported(tmp_path: Path) -> None:
    for i, name in enumerate(["cat", "cat ", "dog"]):
        picture(tmp_path / name / "0.png", i)
    table = read(tmp_path)
    assert table.classes == ("cat", "dog")
    assert any('blanks at their ends are one class: "cat"' in text for text in table.notices)


def test_a_class_may_begin_with_underscores(tmp_path: Path) -> None:
    for i, name in enumerate(["__none__", "cat", "__MACOSX"]):
        picture(tmp_path / name / "0.png", i)
    assert read(tmp_path).classes == ("__none__", "cat")


def test_a_folder_without_images_is_reported_as_no_class(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "0.png")
    (tmp_path / "bird").mkdir()
    (tmp_path / "bird" / "0.heic").write_bytes(b"x")
    said = " ".join(read(tmp_path).notices)
    assert f'"{tmp_path}/bird/" holds no readable image and is not a class' in said
    assert "1 .heic" in said


def test_two_folders_of_one_split_are_named(tmp_path: Path) -> None:
    for i, split in enumerate(["train", "training", "test"]):
        picture(tmp_path / split / "a" / "0.png", i)
    said = " ".join(read(tmp_path).notices)
    assert f'the train rows of {tmp_path} are the rows of "train", "training"' in said


def test_validation_rows_are_the_test_rows_in_every_layout_without_a_test_split(tmp_path: Path) -> None:
    for i, split in enumerate(["train", "val"]):
        picture(tmp_path / "pictures" / split / "a" / "0.png", i)
        (tmp_path / f"{split}.csv").write_text(f"text,label\nw{i},a\n")
    (tmp_path / "texts").mkdir()
    for split in ("train", "val"):
        (tmp_path / f"{split}.csv").rename(tmp_path / "texts" / f"{split}.csv")
    for name in ("pictures", "texts"):
        table = read(tmp_path / name)
        assert table.split.tolist() == ["train", "test"]
        assert any("its validation rows are the test rows" in text for text in table.notices)


def test_a_split_column_without_test_rows_is_reported(tmp_path: Path) -> None:
    rows = [f"w{i},{'ab'[i % 2]},{'val' if i % 5 == 0 else 'train'}" for i in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label,split", *rows]) + "\n")
    table = load_table(DataSpec(path=str(tmp_path / "a.csv")), seed=0)
    assert len(table.rows("test"))
    assert any("no test rows: test rows are taken from its training rows" in text for text in table.notices)


def test_long_pictures_are_named(tmp_path: Path) -> None:
    for i in range(16):
        picture(tmp_path / "ab"[i % 2] / f"{i}.png", i, (64, 8))
    said = " ".join(read(tmp_path).notices)
    assert "16 of 16 images" in said
    assert "3 times as long as wide, such as 64 x 8" in said
