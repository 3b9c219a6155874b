"""Files that are parts of rows: an image next to a text, the mask of an image, a recording."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfm.errors import InputError

IMAGE = "\ufffc"  # marks the place of one of the row's images in a message of a conversation


@dataclass(frozen=True)
class Attachment:
    """A file in a row. Its content is read only when needed, so a table of large files takes little memory.

    Attributes:
        source: the absolute path of the file, or its content.
        place: name of the row that has the file, for messages.
    """

    source: str | bytes
    place: str = field(default="", compare=False)

    def __str__(self) -> str:
        return "a file of the data" if isinstance(self.source, bytes) else self.source

    def content(self) -> bytes:
        """The bytes of the file.

        Raises:
            InputError: the file cannot be read.
        """
        if isinstance(self.source, bytes):
            return self.source
        try:
            return Path(self.source).read_bytes()
        except OSError as error:
            raise InputError(f"{self.source} cannot be read: {error.strerror}") from None

    @property
    def sha256(self) -> str:
        """SHA-256 of the content, 64 hex digits. The file is read each time, because it may have changed."""
        return hashlib.sha256(self.content()).hexdigest()


def readable(source: str | Path | bytes) -> str | Path | io.BytesIO:
    """A file's path, or its content as a file, for libraries that open either."""
    return io.BytesIO(source) if isinstance(source, bytes) else source


def attachments_of(item: Any) -> Iterator[Attachment]:
    """The attachments of one row, in order, at any depth.

    Example:
        >>> [len(a.content()) for a in attachments_of(("a text", (Attachment(b"12"), Attachment(b"345"))))]
        [2, 3]
    """
    if isinstance(item, Attachment):
        yield item
    elif isinstance(item, tuple | list):
        for part in item:
            yield from attachments_of(part)
