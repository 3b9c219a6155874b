"""Warnings about images that use only a small part of the range 0..255, e.g. masks, or that have a single colour."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fedfm.data.table import Table
from fedfm.data.thumbnails import small

_FEW = 8  # with fewer images there is no warning
_LOOKED_AT = 64  # number of images that are decoded
_SIDE = 64  # least side in pixels at which a JPEG is decoded
_DARK = 31  # an image without larger values looks black, e.g. one with values 0..1, 16 grey levels or 5 bits
_MANY = 0.05  # smallest share of such images for which there is a warning


def notices(table: Table) -> tuple[str, ...]:
    """Warnings about images of a single colour, and about images whose values are not scaled to 0..255.

    In a large table only some images are decoded, at equal distances in the table.
    """
    if table.kind != "image" or len(table) < _FEW:
        return ()
    index = np.unique(np.linspace(0, len(table) - 1, _LOOKED_AT).astype(np.int64))
    with ThreadPoolExecutor(4) as pool:  # Pillow decodes outside the interpreter's lock
        ends = np.array(list(pool.map(lambda i: _ends(table.inputs[int(i)]), index)))  # (n, 2)
    one_colour, dark = ends[:, 0] == ends[:, 1], ends[:, 1] <= _DARK
    of = f"{len(index)} pictures of {table.source}" + (" that were looked at" if len(index) < len(table) else "")
    found = []
    if (count := int((dark & ~one_colour).sum())) >= _MANY * len(index):
        top = int(ends[dark & ~one_colour, 1].max())
        found.append(
            f"{count} of {of} have no value above {top}, of 255, and look black to a model: scale them to 0..255"
        )
    if (count := int(one_colour.sum())) >= _MANY * len(index):
        found.append(f"{count} of {of} have one colour alone: there is nothing to see on them")
    return tuple(found)


def _ends(item: Any) -> tuple[int, int]:
    """The smallest and the largest value of an image; they are equal only if all its pixels have the same colour."""
    pixels = np.asarray(small(item, _SIDE))
    flat = pixels.reshape(pixels.shape[0] * pixels.shape[1], -1)
    low, high = int(flat.min()), int(flat.max())
    return (high, high) if bool((flat == flat[0]).all()) else (min(low, high - 1), high)
