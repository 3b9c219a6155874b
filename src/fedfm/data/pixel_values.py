"""Pictures whose pixels use next to nothing of 0..255: masks and small numbers, and pictures of one colour."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from fedfm.data.table import Table
from fedfm.data.thumbnails import small

_FEW = 8  # pictures, below which nothing is said
_LOOKED_AT = 64  # pictures that are decoded for it
_SIDE = 64  # pixels of a JPEG that is decoded for it
_DARK = 31  # largest value of a picture that looks black: of 0..1, of 16 grey levels, of 5 bits
_MANY = 0.05  # share of pictures from which it is told


def notices(table: Table) -> tuple[str, ...]:
    """Lines about pictures of one colour, and about ones that have other numbers than 0..255.

    Of many pictures some are looked at, evenly over the table.
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
    """The smallest and the largest value of a picture; of one with colours that differ in hue alone two values, too."""
    pixels = np.asarray(small(item, _SIDE))
    flat = pixels.reshape(pixels.shape[0] * pixels.shape[1], -1)
    low, high = int(flat.min()), int(flat.max())
    return (high, high) if bool((flat == flat[0]).all()) else (min(low, high - 1), high)
