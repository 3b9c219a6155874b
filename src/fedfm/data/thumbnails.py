"""Small images of arrays and of files; arrays need no reader of files."""

from __future__ import annotations

from typing import Any

import numpy as np


def small(item: Any, side: int) -> Any:
    """An upright Pillow image of an array or a file; of a JPEG at a fraction of its size, but with ``side`` pixels at
    least.

    Raises:
        InputError: the file cannot be read.
    """
    from PIL import Image

    if isinstance(item, np.ndarray):
        return Image.fromarray(item[..., 0] if item.shape[-1] == 1 else item)
    from fedfm.data.pictures import read_image

    return read_image(item, draft=(side, side))
