"""Predictions that are files, such as a mask for each image, and pictures of rows for a report."""

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
        name: name of the file. If several files have the same name, the index of the row is added to each.
        content: bytes of the file.
    """

    name: str
    content: bytes


@dataclass(frozen=True)
class RowPictures:
    """Pictures of a few rows with their targets and predictions, for a report.

    Attributes:
        note: text on what a picture shows.
        colours: the colour of each class as #rrggbb; "" for a class without a colour.
        pictures: (caption, PNG file) for each row.
    """

    note: str
    colours: Mapping[str, str]
    pictures: tuple[tuple[str, bytes], ...]


def has_files(result: Mapping[str, Any]) -> bool:
    """Whether some predictions are files."""
    return any(_are_files(value) for value in result.values())


def write_files(result: Mapping[str, Any], folder: Path, relative: bool) -> dict[str, Any]:
    """Write all files of predictions into a new folder; return the predictions with paths in place of the files.

    Args:
        folder: path of the new folder. If it exists, a number is added to its name.
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
