"""Make small images from arrays or files. For arrays, the module that reads image files is not imported."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fedfm.core.attachments import readable
from fedfm.data.table import Table

_LOOKED_AT = 64  # largest number of images that are decoded
_SIDE = 64  # smallest side in pixels at which a JPEG is decoded


def small(item: Any, side: int) -> Any:
    """An upright Pillow image of an array or a file.

    A JPEG file is decoded at a reduced size, but not below ``side`` pixels.

    Raises:
        InputError: the file cannot be read.
    """
    from PIL import Image

    if isinstance(item, np.ndarray):
        return Image.fromarray(item[..., 0] if item.shape[-1] == 1 else item)
    from fedfm.data.pictures import read_image

    return read_image(item, draft=(side, side))


def figures_of_images(table: Table) -> np.ndarray | None:
    """The result of :func:`figures`; None if the rows are not images."""
    return figures(table) if table.kind == "image" else None


def figures(table: Table) -> np.ndarray:
    """Six numbers about each of at most 64 images: (n, 6). The images are at equal distances in the table.

    The numbers are the image's smallest, largest and mean value, whether it is grey (1 or 0), and its stored width and
    height. The smallest and the largest value are equal only if all pixels have one colour.

    Raises:
        InputError: a file cannot be read.
    """
    if not len(table):
        return np.zeros((0, 6))
    index = np.unique(np.linspace(0, len(table) - 1, _LOOKED_AT).astype(np.int64))
    with ThreadPoolExecutor(4) as pool:  # Pillow decodes outside the interpreter's lock
        return np.array(list(pool.map(lambda i: _figures_of(table.inputs[int(i)]), index)), np.float64)


def _figures_of(item: Any) -> tuple[float, ...]:
    pixels = np.asarray(small(item, _SIDE))
    grey = pixels.ndim == 2 or bool((pixels == pixels[..., :1]).all())
    flat = pixels.reshape(pixels.shape[0] * pixels.shape[1], -1)
    low, high = int(flat.min()), int(flat.max())
    low = high if bool((flat == flat[0]).all()) else min(low, high - 1)
    return low, high, float(flat.mean()), grey, *size_of(item)


def size_of(item: Any) -> tuple[int, int]:
    """(width, height) of an array, or of a file, from its header."""
    if isinstance(item, np.ndarray):
        return item.shape[1], item.shape[0]
    from PIL import Image

    with Image.open(readable(item)) as picture:
        size: tuple[int, int] = picture.size
        return size
