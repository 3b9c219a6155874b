"""CIFAR-100, SVHN and Caltech in the forms in which they are published, made of a few random pictures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedfm
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError

RNG = np.random.default_rng(0)


def picture(size: int = 32) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (size, size, 3), dtype=np.uint8))


def encoded(n: int) -> list[dict[str, Any]]:
    found = []
    for _ in range(n):
        file = io.BytesIO()
        picture().save(file, "PNG")
        found.append({"bytes": file.getvalue(), "path": None})
    return found


def hub_set(column: str, labels: dict[str, list[str]], n: int) -> Any:
    """Rows as the Hub serves them: encoded pictures, and columns of numbered classes."""
    datasets = pytest.importorskip("datasets")
    kinds = {column: datasets.Image()} | {key: datasets.ClassLabel(names=names) for key, names in labels.items()}
    numbers = {key: [i % len(names) for i in range(n)] for key, names in labels.items()}
    return datasets.Dataset.from_dict({column: encoded(n)} | numbers, features=datasets.Features(kinds))


@pytest.mark.parametrize("saved", [False, True])
def test_cifar_100_has_two_columns_of_labels(tmp_path: Path, saved: bool) -> None:
    labels = {"fine_label": ["apple", "aquarium_fish", "baby", "bear"], "coarse_label": ["fruit", "fish"]}
    parts = {split: hub_set("img", labels, n) for split, n in (("train", 24), ("test", 8))}
    if saved:
        datasets = pytest.importorskip("datasets")
        datasets.DatasetDict(parts).save_to_disk(tmp_path / "cifar100")
        where = {"hub": str(tmp_path / "cifar100")}
    else:
        for split, part in parts.items():
            part.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
        where = {"path": str(tmp_path)}
    for label, classes in labels.items():
        table = load_table(DataSpec(**where, label=label), seed=0)
        assert (table.kind, table.classes) == ("image", tuple(classes))
        assert (len(table.rows("train")), len(table.rows("test"))) == (24, 8)
    with pytest.raises(InputError, match="fine_label"):  # fedfm does not guess which of the two it is
        load_table(DataSpec(**where), seed=0)


def test_the_third_split_of_svhn_is_left_out_with_a_notice(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    digits = {"label": [str(i) for i in range(10)]}
    parts = {split: hub_set("image", digits, n) for split, n in (("train", 40), ("test", 20), ("extra", 20))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "svhn")
    table = load_table(DataSpec(hub=str(tmp_path / "svhn")), seed=0)
    assert table.classes == tuple(digits["label"])
    assert (len(table.rows("train")), len(table.rows("test"))) == (40, 20)
    assert any('"extra"' in notice and "left out" in notice for notice in table.notices)


def test_svhn_in_matlab_arrays_is_refused_with_what_to_do(tmp_path: Path) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    pictures = RNG.integers(0, 256, (32, 32, 3, 20), dtype=np.uint8)
    scipy_io.savemat(tmp_path / "train_32x32.mat", {"X": pictures, "y": np.arange(20).reshape(-1, 1) % 10 + 1})
    with pytest.raises(InputError, match=r"arrays of MATLAB, which numpy.savez can write as an \.npz"):
        load_table(DataSpec(path=str(tmp_path / "train_32x32.mat")), seed=0)
    held = scipy_io.loadmat(tmp_path / "train_32x32.mat")
    np.savez(tmp_path / "svhn.npz", x=held["X"].transpose(3, 0, 1, 2), y=held["y"].ravel() % 10)  # their 10 is the 0
    table = load_table(DataSpec(path=str(tmp_path / "svhn.npz")), seed=0)
    assert (table.kind, len(table.classes), len(table)) == ("image", 10, 20)


@pytest.mark.proof
def test_fedpft_runs_on_the_folders_of_caltech(tmp_path: Path) -> None:
    names = ["Faces", "accordion", "water_lilly"]
    for name in names:
        folder = tmp_path / "101_ObjectCategories" / name
        folder.mkdir(parents=True)
        for i in range(12):
            picture(40).save(folder / f"image_{i + 1:04}.jpg")
    tables = {
        "data": {"path": str(tmp_path / "101_ObjectCategories"), "partition": {"name": "iid", "clients": 2}},
        "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
        "method": {"name": "fedpft"},
        "run": {"workers": 1},
    }
    result = fedfm.run(fedfm.Experiment.from_dict(tables), tmp_path / "run")
    assert load_table(DataSpec(path=str(tmp_path / "101_ObjectCategories")), seed=0).classes == tuple(names)
    assert result["rounds"] == 1
