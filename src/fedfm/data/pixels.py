"""Convert pixels in memory to Pillow images; :mod:`fedfm.data.pictures` reads files and encoded images."""

from __future__ import annotations

from typing import Any

import numpy as np


def rgb_of(pixels: np.ndarray) -> Any:
    """A Pillow image of mode RGB from uint8 pixels (H, W, C), C = 1 or 3."""
    from PIL import Image

    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")
