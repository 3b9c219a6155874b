"""Decode images. All sources, predictions, servers and silos do it here, so an image looks the same everywhere.

An image is turned by its EXIF orientation. Its colour profile is not applied. Transparent pixels are laid over white.
If an image has several pages or frames, the first is read. Grey values of more than 8 bits are scaled, not clipped: the
smallest range of 8, 12 or 16 bits that holds the image's values becomes 0..255. In 16-bit colours, and in 16-bit grey
with transparency, only the upper 8 bits are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedfm.core.attachments import readable
from fedfm.data import picture_ends
from fedfm.data.pixels import rgb_of
from fedfm.errors import InputError, reason_of

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"),
    *(".apng", ".avif", ".dib", ".jfif", ".jpe", ".jp2", ".j2k", ".pbm", ".pnm", ".tga"),
)

_SPACES = ("CMYK", "LAB", "HSV")  # Pillow's colour modes that are converted without the file's colour profile
_PROFILE = "a profile other than sRGB"
GREY = ("1", "L", "LA", "La")  # Pillow's modes of grey with at most 8 bits
WIDE = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # Pillow's modes of 16-bit and 32-bit grey
DECODED = 1 << 30  # bytes; a table decodes its images if all have one size and fit, else keeps them encoded
_TOPS = (255, 4095, 65535)  # largest values of 8, 12 and 16 bits
_WHITE = 255
_ORIENTATION = 0x0112  # EXIF tag
_INTERPRETATION, _WHITE_IS_ZERO = 262, 0  # TIFF tag, and its value if 0 is white


@dataclass(frozen=True)
class Look:
    """The findings about one image.

    Attributes:
        fault: why the image cannot be read; None if it can be read.
        frames: number of pages or frames.
        transparent: whether a pixel is not opaque.
        top: for grey with more than 8 bits, the value that becomes white; 0 for other images.
        size: stored width and height.
        grey: whether the image is without colours.
        form: name of the file format.
        deep: whether only the upper 8 of 16 bits are read.
        space: the colour space of the file if it is neither grey nor sRGB, e.g. CMYK, which is used in print.
    """

    fault: str | None = None
    frames: int = 1
    transparent: bool = False
    top: int = 0
    size: tuple[int, int] = (0, 0)
    grey: bool = False
    deep: bool = False
    form: str = ""
    space: str = ""


def rgb(item: Any) -> Any:
    """A Pillow image of mode RGB, from a path, an encoded image or uint8 pixels (H, W, C).

    Raises:
        InputError: the image cannot be read.
    """
    return rgb_of(item) if isinstance(item, np.ndarray) else read_image(item).convert("RGB")


def decode(item: str | Path | bytes, channels: int | None = None) -> np.ndarray:
    """Pixels (H, W, C) uint8 of a path or an encoded image; by default C is 1 for grey images and 3 for all others.

    Raises:
        InputError: the image cannot be read.
    """
    picture = read_image(item)
    grey = picture.mode == "L" if channels is None else channels == 1
    pixels = np.asarray(picture.convert("L" if grey else "RGB"))
    return pixels[..., None] if grey else pixels


def upright(picture: Any) -> Any:
    """An opened Pillow image as a viewer shows it: turned upright, over white, of mode L if it is grey, else RGB.

    Raises:
        ValueError: the image's values are outside all ranges that can be scaled, or Pillow cannot convert them.
    """
    from PIL import Image

    picture.load()
    turn = turn_of(picture)
    if picture.mode in WIDE:
        picture = Image.fromarray(_narrow(picture))
    grey = picture.mode in GREY
    if picture.has_transparency_data:
        seen = _rgba(picture)  # Pillow's other conversions keep the hidden colours of transparent pixels
        if seen.getchannel("A").getextrema()[0] < _WHITE:
            seen = Image.alpha_composite(Image.new("RGBA", seen.size, (_WHITE,) * 4), seen)
        picture = seen.convert("RGB")
    picture = picture.convert("L" if grey else "RGB")
    return picture if turn is None else picture.transpose(turn)


def look(item: str | bytes) -> Look:
    """Check that an image is intact, and find out what is left out or changed when it is read."""
    from PIL import Image

    try:
        with (
            picture_ends.refuse_cut(),
            Image.open(readable(item)) as picture,
        ):
            if lost := picture_ends.fault(item, picture.format):
                return Look(lost)
            about = Look(
                frames=int(getattr(picture, "n_frames", 1)),
                size=picture.size,
                form=str(picture.format),
                grey=picture.mode in GREY or picture.mode in WIDE,
                space=_space(picture),
                deep=picture.mode not in WIDE and any(";16" in str(tile[-1]) for tile in picture.tile),
            )
            wide = picture.mode in WIDE
            if wide or picture.has_transparency_data:
                picture.load()
                if wide:
                    return replace(about, top=_top(np.asarray(picture), picture.mode))
                return replace(about, transparent=_rgba(picture).getchannel("A").getextrema()[0] < _WHITE)
            if picture.format == "PNG":
                picture.verify()  # compares checksums, which is faster than decoding
            else:
                picture.draft("L", (8, 8))  # a JPEG is read completely, but decoded at an eighth of its size
                picture.load()
                picture.convert("RGB")
            return about
    except Exception as error:  # Pillow's plugins raise many classes of errors
        text = str(error).strip()
        return Look("not an image that can be read" if "cannot identify" in text else text or repr(error))


def _space(picture: Any) -> str:
    """The value of :attr:`Look.space` for an opened Pillow image."""
    if picture.mode in _SPACES:
        return str(picture.mode)
    if (profile := picture.info.get("icc_profile")) is None:
        return ""
    from fedfm.data import colour_profiles

    return _PROFILE if colour_profiles.is_other(profile) else ""


def notices_of(looks: Iterable[Look], source: str) -> tuple[str, ...]:
    """Notices about the parts of these images that are left out or changed when they are read."""
    count: Counter[str] = Counter()
    tops: Counter[int] = Counter()
    spaces: set[str] = set()
    total = 0
    for one in looks:
        total += 1
        count["frames"] += one.frames > 1
        count["transparent"] += one.transparent
        count["deep"] += one.deep
        spaces |= {one.space} - {""}
        count["space"] += one.space != ""
        if one.top:
            tops[one.top] += 1
    found = []
    if n := count["frames"]:
        found.append(f"{n} of {total} images of {source} have several pages or frames: the first is read")
    if n := count["transparent"]:
        found.append(f"{n} of {total} images of {source} have transparent pixels, which are laid over white")
    if n := count["space"]:
        found.append(
            f"{n} of {total} images of {source} have colours of print or another space ({', '.join(sorted(spaces))}), "
            "and are converted to RGB without their colour profile, so colours may be off: save them as sRGB"
        )
    if n := count["deep"]:
        found.append(
            f"{n} of {total} images of {source} have colours or transparency with 16 bits, of which the upper 8 are "
            "read: if their values fill only a part of 0..65535, they become dark; save them with 8 bits"
        )
    if tops:
        ranges = " and ".join(f"{n} from 0..{top}" for top, n in sorted(tops.items()))
        mixed = "; if all should have one range, save them with 8 bits" if len(tops) > 1 else ""
        found.append(
            f"{tops.total()} of {total} images of {source} are grey with more than 8 bits and are scaled to 0..255: "
            f"{ranges}{mixed}"
        )
    return tuple(found)


def read_image(item: str | Path | bytes, draft: tuple[int, int] | None = None) -> Any:
    """The upright Pillow image of a file or of its bytes; with ``draft``, a JPEG is decoded at a reduced size.

    Raises:
        InputError: the image cannot be read.
    """
    from PIL import Image

    try:
        with Image.open(readable(item)) as picture:
            if draft is not None:
                picture.draft(None, draft)
            return upright(picture)
    except (OSError, ValueError, SyntaxError) as error:
        where = "an image of the data" if isinstance(item, bytes) else Path(item)
        raise InputError(f"{where}: not readable as an image ({reason_of(error)})") from None


def _rgba(picture: Any) -> Any:
    return (picture.convert("LA") if picture.mode == "La" else picture).convert("RGBA")


def turn_of(picture: Any) -> Any:
    """The rotation or reflection that a loaded image needs; None if it is upright or its EXIF data are damaged."""
    from PIL.Image import Transpose

    try:
        orientation = picture.getexif().get(_ORIENTATION, 1)  # Pillow turns TIFF itself, and removes this tag
    except Exception:  # damaged EXIF data raise many classes of errors; the pixels are still good
        return None
    return {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }.get(orientation)


def _narrow(picture: Any) -> np.ndarray:
    """Grey values (H, W) of more than 8 bits as uint8; a value marked as transparent becomes white."""
    values = np.asarray(picture)
    top = _top(values, picture.mode)
    narrow = _scale(values, top)
    if getattr(picture, "tag_v2", {}).get(_INTERPRETATION) == _WHITE_IS_ZERO:
        narrow = _WHITE - narrow  # Pillow inverts such TIFF files only if they have 8 bits
    clear = picture.info.get("transparency")
    return np.where(values == clear, np.uint8(_WHITE), narrow) if isinstance(clear, int) else narrow


def _scale(values: np.ndarray, top: int) -> np.ndarray:
    """Values 0..top as uint8 0..255."""
    scaled: np.ndarray = ((values.astype(np.uint32) * 255 + top // 2) // top).astype(np.uint8)
    return scaled


def to_eight_bits(pictures: np.ndarray, source: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Convert 16-bit images (N, H, W, C) to uint8 like image files with the same pixels; return (images, notices)."""
    out = np.empty(pictures.shape, np.uint8)
    looks = []
    for i, one in enumerate(pictures):
        grey = one.shape[-1] == 1
        top = _top(one, WIDE[0]) if grey else 0
        out[i] = _scale(one, top) if grey else one >> 8
        looks.append(Look(top=top, grey=grey, deep=not grey))
    return out, notices_of(looks, source)


def _top(values: np.ndarray, mode: str) -> int:
    """The largest value of the smallest range (of 8, 12 or 16 bits) that holds all values."""
    low, high = values.min(), values.max()
    if mode == "F" or low < 0 or high > _TOPS[-1]:
        kind = "floating-point numbers" if mode == "F" else "whole numbers"
        raise ValueError(
            f"its grey values are {kind} from {low:g} to {high:g}, and only the range 0..65535 can be scaled: apply a "
            "window, and save the image with 8 or 16 bits"
        )
    return next(top for top in _TOPS if high <= top)


class Pictured:
    """Base class of sequences of N images, each a path or an encoded image (bytes).

    Attributes:
        decoded: whether a table decodes the images if all have one size and fit into memory.
    """

    decoded: ClassVar[bool] = False


class ListedPictures(list[Any], Pictured):
    """A list of images, each a path or an encoded image (bytes)."""


def arrange(items: Any, at: Callable[[int], str], source: str) -> tuple[Any, tuple[str, ...], list[Look]]:
    """Check all images; return (images, notices, the findings about each image).

    The images are uint8 (N, H, W, C) if ``items.decoded`` is true, all have one size and they fit into memory;
    otherwise they are unchanged.

    Args:
        items: N paths or encoded images.
        at: maps a row's index to its name in messages.

    Raises:
        InputError: an image is missing or cannot be read.
    """
    looks: list[Look] = []
    for row, item in enumerate(items):
        one = look(item) if item else Look("no image")
        if one.fault:
            raise InputError(f"{at(row)}: {one.fault}")
        looks.append(one)
    notices = notices_of(looks, source)
    if not items.decoded:
        return items, notices, looks
    grey = all(one.grey for one in looks)
    width, height = looks[0].size
    if len({one.size for one in looks}) > 1 or len(looks) * width * height * (1 if grey else 3) > DECODED:
        return items, notices, looks
    pixels = [decode(item, 1 if grey else 3) for item in items]
    same = all(one.shape == pixels[0].shape for one in pixels)  # EXIF may turn some images
    return np.stack(pixels) if same else items, notices, looks
