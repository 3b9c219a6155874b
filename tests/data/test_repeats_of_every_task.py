"""Rows that a test set shares with the training rows are named for every task whose rows are texts or images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec

N = 24
TEXTS = [f"row {i} tells of {i * i} things" for i in range(N)]
ROWS = {
    "classification": lambda t: {"text": t, "label": "ab"[len(t) % 2]},
    "regression": lambda t: {"text": t, "label": len(t)},
    "multi_label": lambda t: {"text": t, "label": ["a", "b"][: 1 + len(t) % 2]},
    "language_modelling": lambda t: {"text": t},
    "instruction": lambda t: {"instruction": t, "output": t + "!"},
    "preference": lambda t: {"prompt": t, "chosen": t + "!", "rejected": t + "?"},
    "embedding": lambda t: {"anchor": t, "positive": t + "!"},
    "sequence_to_sequence": lambda t: {"instruction": t, "output": t + "!"},
    "token_classification": lambda t: {"tokens": t.split(), "tags": ["O", "B-X", "O", "O", "O", "O"][: len(t.split())]},
}


def texts(folder: Path, task: str, again: int) -> Path:
    path = folder / "rows.jsonl"
    lines = [ROWS[task](t) | {"split": "train"} for t in TEXTS]
    lines += [ROWS[task](t) | {"split": "test"} for t in [*TEXTS[:again], *(f"new {t}" for t in TEXTS[: 8 - again])]]
    if task == "token_classification":
        lines = [line | {"tags": ["O"] * (len(line["tokens"]) - 1) + ["B-X"]} for line in lines]  # type: ignore[arg-type]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def masked(folder: Path, again: int) -> Path:
    for split, count in (("train", N), ("test", 8)):
        for i in range(count):
            seed = i if split == "train" or i < again else 1000 + i
            pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            for name, of in (("images", pixels), ("masks", pixels[..., 0] % 2)):
                file = folder / split / name / f"{split}{i}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(of).save(file)
    return folder


@pytest.mark.parametrize("again", [0, 3])
@pytest.mark.parametrize("task", [*ROWS, "segmentation"])
def test_test_rows_that_are_training_rows_are_counted(task: str, again: int, tmp_path: Path) -> None:
    path = masked(tmp_path, again) if task == "segmentation" else texts(tmp_path, task, again)
    said = " ".join(load_table(DataSpec(path=str(path)), seed=0, task=task).notices)
    assert ("are also training rows" in said) == bool(again)
    assert (f"{again} of 8 test rows are also training rows" in said) == bool(again)


@pytest.mark.parametrize("task", ["language_modelling", "segmentation"])
def test_rows_that_two_silos_hold_are_counted(task: str, tmp_path: Path) -> None:
    """Documents and images with masks were compared by nobody."""
    for name in ("north", "south"):
        (tmp_path / name).mkdir()
        masked(tmp_path / name, 0) if task == "segmentation" else texts(tmp_path / name, task, 0)
    ending = "" if task == "segmentation" else "/rows.jsonl"
    clients = {name: f"{tmp_path}/{name}{ending}" for name in ("north", "south")}
    said = " ".join(load_table(DataSpec(clients=clients), seed=0, task=task).notices)
    assert f"north and south have {N} training rows in common" in said
