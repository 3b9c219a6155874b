"""Pixels in memory as Pillow images; :mod:`fedfm.data.pictures` reads files and encoded images."""

from __future__ import annotations

from typing import Any

import numpy as np


def rgb_of(pixels: np.ndarray) -> Any:
    """The Pillow image of mode RGB with uint8 pixels (H, W, C)."""
    from PIL import Image

    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")
