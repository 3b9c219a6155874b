"""Small experiments on made feature vectors: a run takes a tenth of a second."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.core.fields import check


def features(folder: Path, n: int = 240, d: int = 8, classes: int = 4, seed: int = 0) -> Path:
    """An npz of Gaussian classes with train and test rows and a column of domains."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    centres = rng.normal(size=(classes, d)) * 2
    x = (centres[y] + rng.normal(size=(n, d))).astype(np.float32)
    path = folder / "rows.npz"
    np.savez(
        path,
        x=x,
        y=y,
        split=np.where(np.arange(n) % 5 == 0, "test", "train"),
        classes=np.array(["ant", "bee", "cow", "dog"][:classes]),
        domain=np.array(["n", "s", "e"])[rng.integers(0, 3, n)],
    )
    return path


def pictures(folder: Path, n: int = 240, side: int = 16, classes: int = 4, seed: int = 0) -> Path:
    """An npz of noisy pictures, a colour a class, with train and test rows."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    colours = np.array([[230, 30, 30], [30, 230, 30], [30, 30, 230], [220, 220, 30]])[:classes]
    x = colours[y][:, None, None] + rng.normal(0, 40, (n, side, side, 3))
    path = folder / "pictures.npz"
    split = np.where(np.arange(n) % 5 == 0, "test", "train")
    names = np.array(["ant", "bee", "cow", "dog"][:classes])
    np.savez(path, x=x.clip(0, 255).astype(np.uint8), y=y, split=split, classes=names)
    return path


def tiny_vit(folder: Path) -> Path:
    """A random ViT of one block and width 8, as a folder: a step takes a millisecond or two."""
    import torch
    import transformers
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    from fedfm.models.quiet import quiet

    path, shape = folder / "tiny-vit", {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if not path.exists():
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            config = transformers.ViTConfig(**shape, intermediate_size=16, image_size=16, patch_size=8)
            transformers.ViTModel(config).save_pretrained(path)
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(path)
    return path


def experiment(folder: Path, **changes: Any) -> dict[str, Any]:
    """Nested tables; ``method={"name": "fedadam"}`` and the like update a table."""
    path = folder / "rows.npz"
    if not path.exists():
        features(folder)
    tables: dict[str, Any] = {
        "data": {"path": str(path), "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 5}},
        "model": {"name": "features"},
        "method": {"name": "fedavg", "rounds": 4, "fraction": 0.6, "local": {"learning_rate": 0.2, "batch_size": 16}},
        "run": {"seed": 1, "workers": 1},
    }
    for table, values in changes.items():
        tables[table] = {**tables.get(table, {}), **values}
    return tables


def checked(method: Any) -> None:
    """Refuse a method's values and rules as an experiment that names it would."""
    check(method, "method")
    method.validate()


def jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as lines of JSON; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
