"""Pictures of rows for a report: each shows an image, its mask and the predicted mask next to each other."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfm.core.output_files import RowPictures
from fedfm.data import pictures as files
from fedfm.data.table import Table
from fedfm.tasks import _mask_files
from fedfm.tasks._mask_scores import enlarge
from fedfm.tasks._masked_rows import number_to_name

if TYPE_CHECKING:
    from fedfm.models.trained import Trained

_SIDE = 256  # largest width or height of one of the three parts, in pixels
_LEAST = 128  # a small image is enlarged by the largest whole factor with which no side exceeds this, in pixels
_GAP = 4  # width of the white gap between two parts, in pixels
_TINT = 0.55  # share of the class's colour in a tinted pixel
_COLOURS = (  # first Okabe and Ito's colours, which colour-blind people can tell apart
    *("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"),
    *("#8dd3c7", "#b15928", "#6a3d9a", "#b2df8a", "#fb9a99", "#1f78b4"),
)


def pictures(trained: Trained, table: Table, ignored: int) -> RowPictures:
    """A picture of each row; pixels of the first class have no tint, and ignored pixels of a mask are black."""
    classes, found = trained.model.classes, []
    colours = {name: _COLOURS[(i - 1) % len(_COLOURS)] if i else "" for i, name in enumerate(classes)}
    code = {name: i for i, name in enumerate(classes)}
    rows = trained.encode(trained.model.prepare(table, range(len(table))))
    for i, ((image, mask, names), logits) in enumerate(zip(table.inputs, trained.logits(rows), strict=True)):
        picture = files.rgb(image.source)
        small = picture.copy()
        small.thumbnail((_SIDE, _SIDE))
        if (factor := _LEAST // max(small.size)) > 1:
            small = small.resize((small.width * factor, small.height * factor), resample=0)  # 0 is nearest neighbour
        size = small.height, small.width
        numbers = _mask_files.nearest(_mask_files.read(mask), size)
        right = np.full(size, -1)
        for number in np.unique(numbers).tolist():
            if number != ignored:
                right[numbers == number] = code[number_to_name(number, names)]
        said = enlarge(logits[None], (picture.height, picture.width))[0].argmax(0).numpy()
        parts = [np.asarray(small), *(_tint(small, of, colours) for of in (right, _mask_files.nearest(said, size)))]
        gap = np.full((size[0], _GAP, 3), 255, np.uint8)
        found.append((_caption(image.source, i), _png(np.hstack([parts[0], gap, parts[1], gap, parts[2]]))))
    note = (
        f"From left to right: the image, its mask, the predicted mask. Pixels of {classes[0]} have no tint; pixels "
        "of a mask that do not count are black."
    )
    return RowPictures(note, colours, tuple(found))


def _tint(image: Any, indexes: np.ndarray, colours: dict[str, str]) -> np.ndarray:
    pixels = np.asarray(image).astype(np.float64)
    for i, colour in enumerate(colours.values()):
        if colour:
            tint = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])
            pixels[indexes == i] = (1 - _TINT) * pixels[indexes == i] + _TINT * tint
    pixels[indexes < 0] = 0
    return pixels.astype(np.uint8)


def _caption(source: str | bytes, row: int) -> str:
    return Path(source).name if isinstance(source, str) else f"test row {row}"


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
