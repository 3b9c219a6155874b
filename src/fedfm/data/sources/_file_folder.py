"""Read folders whose files are rows, such as recordings in the layout of Hugging Face's ``audiofolder``.

Files are in ``train`` and ``test`` (also ``val``), or in the folder itself, at any depth. As in an image folder, each
of these folders may have a ``metadata.csv`` (or .jsonl, .parquet) with ``file_name`` and further columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedfm.data.sources import images, tables
from fedfm.data.sources._endings import FILES
from fedfm.data.sources._files import visible_entries
from fedfm.data.sources._sheet import Sheet
from fedfm.data.sources._splits import joined_splits, other_marks, with_test
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError


def sheet(path: Path, spec: DataSpec, column: str, holds: str, *, labelled: bool) -> Sheet | None:
    """The files as a column, their splits, their folders, and the columns of metadata; None if ``path`` has tables.

    Args:
        column: name of the column for the files' absolute paths.
        holds: what a file is, "image" or "recording".
        labelled: False for rows to predict, which have no splits.

    Raises:
        InputError: there is no such file, or metadata do not match the files.
    """
    if tables.files_of(path):
        return None
    if there := next((p for p in visible_entries(path) if p.is_file() and tables.is_table(p)), None):
        raise InputError(f"{there} is next to folders: name this file if it has the rows, else remove it")
    strange: list[str] = []
    parts = images.parts(path, FILES[holds], holds) if labelled else {path: None}
    homes = {file: home for home in parts for file in files_below(home, holds, strange)}
    files = list(homes)
    if not files:
        shown = ", ".join(FILES[holds][:4])
        raise InputError(f"{path} has no {holds}s ({shown}, ...), and no file of rows such as a csv")
    columns: dict[str, list[Any]] = {column: [str(file.absolute()) for file in files]}
    folders = ["/".join(file.relative_to(home).parts[:-1]) for file, home in homes.items()]
    if any(folders):
        columns["folder"] = folders
    notices: tuple[str, ...] = ()
    marks = [split for split in (parts[home] for home in homes.values()) if split is not None]
    if marks and labelled:
        columns[spec.split], notices = with_test(marks, str(path))
        notices += joined_splits({home.name: split for home, split in parts.items()}, str(path))
    meta = images.metadata(path, list(parts), files, holds)
    if marks and labelled:
        notices += other_marks(meta.get(spec.split), marks, spec.split, str(path))
    columns |= {key: cells for key, cells in meta.items() if key not in columns}
    return Sheet(columns, lambda row: str(files[row]), (*notices, *left_out(path, strange, holds)))


def files_below(folder: Path, holds: str, strange: list[str]) -> list[Path]:
    """The files of this kind below a folder, sorted; names of other files are added to ``strange``."""
    found = []
    for entry in visible_entries(folder):
        if entry.is_dir():
            found += files_below(entry, holds, strange)
        elif entry.suffix.lower() in FILES[holds]:
            found.append(entry)
        elif entry.name not in images.METADATA:
            strange.append(str(entry))
    return found


def left_out(path: Path, strange: list[str], holds: str) -> tuple[str, ...]:
    """A notice about files that are not read, if there are any."""
    if not strange:
        return ()
    what, was = ("file", "was") if len(strange) == 1 else ("files", "were")
    return (
        f"{len(strange)} {what} of {path} without the ending of a readable {holds} {was} left out, e.g. {strange[0]}",
    )
