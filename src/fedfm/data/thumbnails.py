"""Make small images from arrays or files. For arrays, the module that reads image files is not imported."""

from __future__ import annotations

from typing import Any

import numpy as np


def small(item: Any, side: int) -> Any:
    """A Pillow image of an array or a file, rotated upright.

    A JPEG file is decoded at a fraction of its size, but not below ``side`` pixels.

    Raises:
        InputError: the file cannot be read.
    """
    from PIL import Image

    if isinstance(item, np.ndarray):
        return Image.fromarray(item[..., 0] if item.shape[-1] == 1 else item)
    from fedfm.data.pictures import read_image

    return read_image(item, draft=(side, side))
