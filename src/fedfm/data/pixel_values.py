"""Warnings about images that use only a small part of 0..255, that have a single colour, or are long and narrow."""

from __future__ import annotations

import numpy as np

from fedfm.data.table import Table

_FEW = 8  # with fewer images there is no warning
_DARK = 31  # an image without larger values looks black, e.g. one with values 0..1, 16 grey levels or 5 bits
_LONG = 3  # ratio of the sides of an image that loses much detail in a square
_MANY = 0.05  # smallest share of dark images, or of images of one colour, for which there is a warning


def notices(table: Table, images: np.ndarray | None) -> tuple[str, ...]:
    """Warnings about images of a single colour, and about images whose values are not scaled to 0..255.

    Args:
        images: the result of :func:`fedfm.data.thumbnails.figures` for the table; None if it has no images.
    """
    if images is None or len(table) < _FEW:
        return ()
    ends = images[:, :2]
    one_colour, dark = ends[:, 0] == ends[:, 1], ends[:, 1] <= _DARK
    of = f"{len(ends)} images of {table.source}" + (" (a sample)" if len(ends) < len(table) else "")
    found = []
    if (count := int((dark & ~one_colour).sum())) >= _MANY * len(ends):
        top = int(ends[dark & ~one_colour, 1].max())
        found.append(
            f"{count} of {of} have no value above {top} (of 255) and look black to a model: scale them to 0..255"
        )
    if (count := int(one_colour.sum())) >= _MANY * len(ends):
        found.append(f"{count} of {of} have only one colour: they show nothing")
    sides = images[:, 4:]
    long = sides.max(1) >= _LONG * sides.min(1)
    if (count := int(long.sum())) >= _MANY * len(ends):
        width, height = sides[long][0].astype(int)
        found.append(
            f"{count} of {of} are at least {_LONG} times as long as wide, such as {width} x {height}: most models "
            "read squares, so preprocessing squeezes such an image or cuts off its ends"
        )
    return tuple(found)
