"""Image files that lost their end, and that decoders fill with grey or black without an error.

A download that broke off, or a disk that failed, leaves zeros behind the data at the full length of the file. Of such a
JPEG libjpeg decodes the rest as grey. A file that was saved again after that holds a grey half as any other pixels: no
reader can tell it from a picture.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCAN, _END = b"\xda", b"\xff\xd9"
_BARE = frozenset(range(0xD0, 0xD8)) | {0x01}  # markers without a segment
_HOLE = bytes(512)  # a sector of zeros
_JPEG, _PACKED = ("JPEG", "MPO"), ("WEBP", "AVIF")  # the latter have no checksums, and data that do not end in zeros

_lock, _strict, _before = threading.Lock(), 0, False


def fault(item: str | bytes, form: str | None) -> str | None:
    """Why the image of this format, a path or encoded, has lost its end; None if nothing says so."""
    if form not in (*_JPEG, *_PACKED):
        return None
    last = item[-len(_HOLE) :] if isinstance(item, bytes) else _last(item)
    if form in _PACKED:
        return f"a {form} file that ends in zeros: a part of it is missing" if last == _HOLE else None
    if last.endswith(_END) or _jpeg_ends(item if isinstance(item, bytes) else Path(item).read_bytes()):
        return None
    return "a JPEG without its end: a part of it is missing"


def _last(path: str) -> bytes:
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - len(_HOLE), 0))
        return file.read()


def _jpeg_ends(data: bytes) -> bool:
    """Whether a mark of the end follows the data of the first scan; what is behind it, as a film, does not count."""
    at = 2
    while at + 4 <= len(data):
        if data[at] != 0xFF:
            at += 1
        elif data[at + 1] == 0xFF or data[at + 1] in _BARE:
            at += 1 if data[at + 1] == 0xFF else 2
        elif data[at + 1 : at + 2] == _SCAN:
            return data.find(_END, at) >= 0
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return True  # no scan: Pillow says what is wrong with it


@contextmanager
def refuse_cut() -> Iterator[None]:
    """Have Pillow raise an error for an image that was cut short, also where a program has set that it fills it."""
    from PIL import ImageFile

    global _strict, _before
    with _lock:
        if not _strict:
            _before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
        _strict += 1
    try:
        yield
    finally:
        with _lock:
            _strict -= 1
            if not _strict:
                ImageFile.LOAD_TRUNCATED_IMAGES = _before
