"""Files among predictions, such as a mask for each image, and pictures of rows in a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from fedfm.core import storage
from fedfm.errors import RunError


@dataclass(frozen=True)
class OutputFile:
    """A file that a task predicts for a row.

    Attributes:
        name: its name; files of equal names get the index of their row, too.
        content: its bytes.
    """

    name: str
    content: bytes


@dataclass(frozen=True)
class RowPictures:
    """Pictures of a few rows with their targets and predictions, for a report.

    Attributes:
        note: what a picture shows.
        colours: for each class, its colour as #rrggbb; "" if it has none.
        pictures: (caption, PNG) of each row.
    """

    note: str
    colours: Mapping[str, str]
    pictures: tuple[tuple[str, bytes], ...]


def has_files(result: Mapping[str, Any]) -> bool:
    """Whether predictions have files."""
    return any(_are_files(value) for value in result.values())


def write_files(result: Mapping[str, Any], folder: Path, relative: bool) -> dict[str, Any]:
    """Write all files of predictions into a new folder; the result has their paths in their place.

    Args:
        folder: the folder; if it exists, its name gets a number.
        relative: whether the paths are relative to the folder that contains ``folder``.

    Raises:
        RunError: a file cannot be written.
    """
    found, free = dict(result), (folder.with_name(f"{folder.name}-{i}") for i in count(2))
    folder = folder if not folder.exists() else next(place for place in free if not place.exists())
    try:
        folder.mkdir(parents=True)
        for key, value in result.items():
            if _are_files(value):
                names = _different([file.name for file in value])
                for name, file in zip(names, value, strict=True):
                    (folder / name).write_bytes(file.content)
                place = Path(folder.name) if relative else folder.absolute()
                found[key] = [str(place / name) for name in names]
    except OSError as error:
        raise RunError(f"{folder}: cannot be written: {storage.why(error)}") from None
    return found


def _are_files(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], OutputFile)


def _different(names: list[str]) -> list[str]:
    often = Counter(name.lower() for name in names)
    return [f"{i:05d}-{name}" if often[name.lower()] > 1 else name for i, name in enumerate(names)]
