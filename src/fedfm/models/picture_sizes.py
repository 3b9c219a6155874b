"""Checks that an image processor makes tensors of one size from all images, so that they fit into one batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fedfm.core.attachments import readable
from fedfm.errors import InputError
from fedfm.models.images import Preprocess

_TRIED = ((64, 64), (96, 64), (64, 96))  # width, height
_TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height


def check(inputs: Any, rows: np.ndarray, preprocess: Preprocess, source: str) -> None:
    """Refuse images from which the processor would make tensors of several sizes.

    Args:
        inputs: the inputs of a table of images.
        rows: (n,) indexes of the images that are used.

    Raises:
        InputError: there are several sizes; the error names two of the images.
    """
    from PIL import Image

    def shape(size: tuple[int, int]) -> tuple[int, ...]:
        return tuple(preprocess([Image.new("RGB", size)]).shape[1:])

    if isinstance(inputs, np.ndarray) or not len(rows):
        return
    try:
        if len({shape(size) for size in _TRIED}) == 1:
            return  # the processor makes one size of all images, so no file is opened
    except (ValueError, TypeError):  # the processor refuses small images
        pass
    first: dict[tuple[int, int], int] = {}
    for row, size in _sizes(inputs, rows):
        first.setdefault(size, row)
    shapes: dict[tuple[int, ...], tuple[int, int]] = {}
    for size in first:
        shapes.setdefault(shape(size), size)
    if len(shapes) < 2:
        return
    named = [f"{_name(inputs[first[size]], first[size])} ({size[0]} x {size[1]})" for size in list(shapes.values())[:2]]
    raise InputError(
        f"{source}: {named[0]} and {named[1]} have different sizes, and the image processor of model.name keeps them: "
        "crop the images to one size, or set do_resize or do_center_crop in its preprocessor_config.json"
    )


def _sizes(inputs: Any, rows: np.ndarray) -> Iterator[tuple[int, tuple[int, int]]]:
    """Row and size (width, height) of each image as it is displayed, from the headers of the files."""
    from PIL import Image

    for row in rows.tolist():
        item = inputs[row]
        with Image.open(readable(item)) as picture:
            width, height = picture.size
            turned = picture.getexif().get(0x0112) in _TURNED
        yield row, (height, width) if turned else (width, height)


def _name(item: Any, row: int) -> str:
    return f"image {row + 1}" if isinstance(item, bytes) else str(item)
