"""Pixels in memory as pictures of Pillow; :mod:`fedfm.data.pictures` reads files and encoded pictures."""

from __future__ import annotations

from typing import Any

import numpy as np


def rgb_of(pixels: np.ndarray) -> Any:
    """The Pillow picture, of mode RGB, of uint8 pixels (H, W, C)."""
    from PIL import Image

    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")
