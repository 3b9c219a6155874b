"""Read columns whose cells are files: their paths, relative to the folder of the rows, or their contents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedfm.core.attachments import Attachment
from fedfm.data.sources._files import At
from fedfm.errors import InputError, close


def attachments(values: Sequence[Any], name: str, at: At, source: str, holds: str) -> list[Attachment]:
    """The files of a column, one for each row.

    A cell is a path relative to the folder of the rows, or the content: bytes, or the Hub's dict of "bytes" and "path".

    Args:
        name: name of the column.
        at: gives the name of a row by its index, for messages.
        source: the file or folder of the rows.
        holds: the expected content, such as "an image".

    Raises:
        InputError: a cell is empty or of another type, or there is no such file.
    """
    return [attachment(value, name, at(row), source, holds) for row, value in enumerate(values)]


def attachment(value: Any, name: str, place: str, source: str, holds: str) -> Attachment:
    """The file of one cell. ``place`` is the name of its row in messages; :func:`attachments` explains the rest."""
    if isinstance(value, dict) and ("bytes" in value or "path" in value):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and value:
        return Attachment(value, place)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f'{place}: column "{name}" holds {value!r:.40}: the path of {holds} is expected')
    home = Path(source) if Path(source).is_dir() else Path(source).parent
    path = (home / Path(value.strip()).expanduser()).absolute()
    if not path.is_file():
        there = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise InputError(f'{place}: column "{name}": there is no file {path}{close(path.name, there)}')
    return Attachment(str(path), place)
