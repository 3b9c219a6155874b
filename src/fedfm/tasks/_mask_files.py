"""Decode masks, which are images of class numbers, and encode predicted masks.

:mod:`fedfm.data.pictures` would scale 16-bit values and replace palette indices by colours, so this module reads
masks itself.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedfm.core.attachments import Attachment, readable
from fedfm.data import picture_ends, pictures
from fedfm.errors import InputError, reason_of

_LOSSLESS = ("PNG", "TIFF", "BMP", "GIF")  # other formats, such as JPEG, may change class numbers
_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "I;16N")
_STRETCHED = {"L;2": 85, "L;4": 17}  # Pillow scales 2-bit and 4-bit values to 0..255, in steps of this size
_INTERPRETATION, _WHITE_IS_ZERO = 262, 0  # TIFF tag of the photometric interpretation; its value if 0 is white
_SMALL = 256  # largest number of classes in an 8-bit mask
LARGEST = 999  # largest class number


@dataclass(frozen=True)
class MaskLook:
    """The result of checking an image and its mask.

    Attributes:
        fault: why the row cannot be read; empty if it can.
        numbers: the numbers in the mask, ascending.
        image: the findings about the image.
        colours: for a mask with a palette, the colour (red, green, blue) of each number in it.
        turned: whether the image is turned by its EXIF orientation, and the mask is not.
    """

    fault: str = ""
    numbers: tuple[int, ...] = ()
    image: pictures.Look = field(default_factory=pictures.Look)
    colours: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    turned: bool = False


def look(image: Attachment, mask: Attachment | None) -> MaskLook:
    """Check that an image and its mask are intact and have the same size; without a mask, check the image alone."""
    found = pictures.look(image.source)
    if found.fault:
        return MaskLook(f"the image {image}: {found.fault}")
    if mask is None:
        return MaskLook(image=found)
    try:
        numbers = read(mask)
    except InputError as error:
        return MaskLook(str(error))
    width, height = size_of(image)
    if (height, width) != numbers.shape:
        turned = " (turned by their EXIF orientation)" if (width, height) == numbers.shape else ""
        return MaskLook(
            f"the image {image} has {width} x {height} pixels and the mask {mask} has {numbers.shape[1]} x "
            f"{numbers.shape[0]}{turned}: a mask has the size of its image"
        )
    present = np.flatnonzero(np.bincount(numbers.ravel())) if numbers.max() <= 65535 else np.unique(numbers)
    alone = _is_turned(image) and not _is_turned(mask)
    return MaskLook("", tuple(present.tolist()), found, _colours(mask, present.tolist()), turned=alone)


def _colours(mask: Attachment, numbers: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The palette's colour of each of these numbers; {} for a mask without a palette."""
    from PIL import Image

    with Image.open(readable(mask.source)) as picture:
        flat = (picture.getpalette() or []) if picture.mode == "P" else []
    return {n: tuple(flat[3 * n : 3 * n + 3]) for n in numbers if len(flat) >= 3 * n + 3}


def _is_turned(file: Attachment) -> bool:
    """Whether an image is turned or mirrored by its EXIF orientation."""
    from PIL import Image

    with Image.open(readable(file.source)) as picture:
        return pictures.turn_of(picture) is not None


def size_of(image: Attachment) -> tuple[int, int]:
    """Width and height of an image after it is turned by its EXIF orientation."""
    from PIL import Image
    from PIL.Image import Transpose

    swaps = (Transpose.TRANSPOSE, Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90)
    with Image.open(readable(image.source)) as picture:
        if picture.format == "TIFF":  # Pillow turns a TIFF when it loads the pixels
            picture.load()
        width, height = picture.size
        return (height, width) if pictures.turn_of(picture) in swaps else (width, height)


def read(mask: Attachment) -> np.ndarray:
    """The class numbers (H, W), int32, of a mask after it is turned by its EXIF orientation.

    Raises:
        InputError: the file is not a lossless image with one whole number for each pixel.
    """
    from PIL import Image

    if fault := pictures.look(mask.source).fault:
        raise InputError(f"the mask {mask}: {fault}")
    try:
        with picture_ends.refuse_cut(), Image.open(readable(mask.source)) as picture:
            _check(picture, mask)
            raw = str(picture.tile[0][-1]) if picture.tile else ""
            picture.load()
            turn = pictures.turn_of(picture)
            values = np.asarray(picture if turn is None else picture.transpose(turn)).astype(np.int32)
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(f"the mask {mask}: not readable as an image ({reason_of(error)})") from None
    return values // _STRETCHED.get(raw, 1)


def _check(picture: Any, mask: Attachment) -> None:
    wanted = "expected one class number per pixel: a PNG of 8 or 16 bits grey, or with a palette"
    if picture.format not in _LOSSLESS:
        raise InputError(f"the mask {mask} is a {picture.format}, which may change numbers; {wanted}")
    if getattr(picture, "n_frames", 1) > 1:
        raise InputError(f"the mask {mask} has several pages or frames; {wanted}")
    if getattr(picture, "tag_v2", {}).get(_INTERPRETATION) == _WHITE_IS_ZERO:
        raise InputError(f"the mask {mask} is a TIFF in which 0 is white; {wanted}")
    if picture.mode not in _MODES:
        what = "colours" if picture.mode.startswith(("RGB", "CMYK", "YCbCr")) else f"pixels of mode {picture.mode}"
        raise InputError(f"the mask {mask} has {what}; {wanted}")


def png(numbers: np.ndarray) -> bytes:
    """Class numbers (H, W) as a grey PNG: if all numbers are below 256, of 8 bits, else of 16 bits."""
    from PIL import Image

    small = not numbers.size or numbers.max() < _SMALL
    buffer = io.BytesIO()
    Image.fromarray(numbers.astype(np.uint8 if small else np.uint16)).save(buffer, "PNG")
    return buffer.getvalue()


def nearest(numbers: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize class numbers (H, W) to (H', W') by nearest neighbour, as image processors resize masks."""
    from PIL import Image

    if numbers.shape == size:
        return numbers
    resized = Image.fromarray(numbers.astype(np.int32)).resize(size[::-1], Image.Resampling.NEAREST)
    return np.asarray(resized)
