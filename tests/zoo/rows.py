"""Rows for the zoo: files to train with, and shorter ones to predict."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo.families import SIDE
from zoo.making import ANIMALS

CLASSES = ("bad", "good")
FEW = 5


def write(folder: Path) -> Path:
    """The folder, with all files."""
    texts = [_text(i) for i in range(40)]
    _lines(folder / "classification.jsonl", texts)
    _lines(folder / "classification-few.jsonl", texts[:FEW])
    _lines(folder / "language_modelling.jsonl", [{"text": row["text"]} for row in texts])
    _lines(folder / "language_modelling-few.jsonl", [{"text": " ".join(f"w{i * 5 % 40}" for i in range(12))}])
    asked = [{"instruction": f"say {name}", "output": name} for name in ANIMALS * 6]
    _lines(folder / "instruction.jsonl", asked)
    _lines(folder / "instruction-few.jsonl", asked[:FEW])
    pairs = [
        {"prompt": f"say {name}", "chosen": name, "rejected": ANIMALS[(i + 1) % len(ANIMALS)]}
        for i, name in enumerate(ANIMALS * 6)
    ]
    _lines(folder / "preference.jsonl", pairs)
    _lines(folder / "preference-few.jsonl", asked[:FEW])
    x, y = pictures()
    names = np.array(["dark", "light"])
    np.savez(folder / "pictures.npz", x=x, y=y, classes=names)
    np.savez(folder / "pictures-few.npz", x=x[:FEW], y=y[:FEW], classes=names)
    return folder


def pictures(n: int = 40) -> tuple[Any, Any]:
    """(pictures uint8 (n, H, W, 3), labels (n,)): noise, half of it darker above."""
    y = np.arange(n) % 2
    x = np.random.default_rng(0).integers(0, 255, (n, SIDE, SIDE, 3)).astype(np.uint8)
    x[y == 0, : SIDE // 2] //= 4
    return x, y


def _text(i: int) -> dict[str, str]:
    """A text of 3 to 11 words, the first of which is its class."""
    words = [CLASSES[i % 2], *(f"w{(i * 7 + j * 3) % 40}" for j in range(2 + i % 9))]
    return {"text": " ".join(words), "label": CLASSES[i % 2]}


def _lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
