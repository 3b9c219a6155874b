"""Detect truncated image files, which decoders fill with grey or black without an error.

After an interrupted download or a disk failure, a file may have its full length but end in zeros. libjpeg decodes the
missing part of such a JPEG as grey. If that decoded image was saved again, its grey part consists of ordinary pixels,
and no reader can detect it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCAN, _END = b"\xda", b"\xff\xd9"
_BARE = frozenset(range(0xD0, 0xD8)) | {0x01}  # JPEG markers after which no segment follows
_HOLE = bytes(512)  # a sector of zeros
_JPEG, _PACKED = ("JPEG", "MPO"), ("WEBP", "AVIF")  # WebP and AVIF have no checksums; intact files do not end in zeros

_lock, _strict, _before = threading.Lock(), 0, False


def fault(item: str | bytes, form: str | None) -> str | None:
    """Why an image (a path or encoded bytes) of the file format ``form`` seems truncated; None if it seems complete."""
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
    """Whether an end marker follows the first scan; data after the image, such as an appended film, are ignored."""
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
    return True  # a JPEG without a scan: Pillow reports this fault


@contextmanager
def refuse_cut() -> Iterator[None]:
    """Make Pillow raise an error for truncated images, even if the program has set LOAD_TRUNCATED_IMAGES."""
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
