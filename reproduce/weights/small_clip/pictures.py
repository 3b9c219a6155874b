"""Read the labelled picture sets that the scripts here train and measure on."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Pictures:
    """A part of a set: ``x`` uint8 (N, H, W, C), ``y`` int64 (N,), class names, ``domain`` (N,) and domain names."""

    x: np.ndarray
    y: np.ndarray
    classes: tuple[str, ...]
    domain: np.ndarray
    domains: tuple[str, ...]

    def __getitem__(self, rows: np.ndarray) -> Pictures:
        return Pictures(self.x[rows], self.y[rows], self.classes, self.domain[rows], self.domains)

    def images(self) -> list[Image.Image]:
        """The pictures in RGB."""
        return [Image.fromarray(x.squeeze()).convert("RGB") for x in self.x]


def read(path: Path, test: bool) -> Pictures:
    """Read the test rows or the training rows of an npz file.

    ``blob[offsets[i]:offsets[i + 1]]`` is one encoded picture, or a sheet of ``tiles x tiles`` pictures, row-major,
    where ``meta`` says that the format is "mosaic".
    """
    z = np.load(path, allow_pickle=False)
    meta, blob, off = json.loads(str(z["meta"])), z["blob"], z["offsets"]
    n, h, w, c = (meta[k] for k in ("n", "height", "width", "channels"))
    t = meta["tiles"] if meta["format"] == "mosaic" else 1
    x = np.empty((n, h, w, c), np.uint8)
    for k in range(len(off) - 1):
        sheet = Image.open(io.BytesIO(blob[off[k] : off[k + 1]].tobytes())).convert("L" if c == 1 else "RGB")
        tiles = np.asarray(sheet).reshape(t, h, t, w, c).swapaxes(1, 2).reshape(-1, h, w, c)
        x[k * t * t : (k + 1) * t * t] = tiles[: n - k * t * t]
    domain = z["domain"].astype(np.int64) if "domain" in z else np.zeros(n, np.int64)
    whole = Pictures(x, z["label"].astype(np.int64), tuple(meta["classes"]), domain, tuple(meta.get("domains") or ()))
    return whole[z["is_test"].astype(bool) == test]
