"""Read the rows of a file or a folder; the ending of the file's name selects the reader."""

from __future__ import annotations

import importlib
from pathlib import Path

from fedfm.core import tasks
from fedfm.data.sources import tables
from fedfm.data.sources._files import begin, content_of, formats
from fedfm.data.sources._tabular import to_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.data.task_rows import row_task
from fedfm.errors import InputError

_SUFFIXES = {
    ".npz": "npz",
    ".txt": "text",
    ".txt.gz": "text",
}  # endings of files that are not tables, and their readers


def read(path: Path, spec: DataSpec, task: str | None, *, labelled: bool) -> Table:
    """The rows of a file, or of a folder of files.

    Args:
        spec: names of the columns.
        task: the name of the task; None if the data imply it.
        labelled: False for rows to predict.

    Raises:
        InputError: no reader knows this ending, or the content is invalid; the message says where.
    """
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            if not labelled:
                raise InputError(f"{path} is a folder written by save_to_disk; expected {formats()}")
            raise InputError(f'{path} is a folder written by save_to_disk: give it as data.hub = "{path}"')
        named = tasks.task_named(task)
        if named is not None and (sheet := row_task(named).folder(path, spec, labelled=labelled)) is not None:
            return to_table(sheet, spec, source=str(path), task=task, labelled=labelled)
        if files := tables.files_of(path, task):
            return tables.read_folder(path, files, spec, task=task, labelled=labelled)
        module = "images"
    else:
        name, named = path.name.lower(), tasks.task_named(task)
        module = next((reader for suffix, reader in _SUFFIXES.items() if name.endswith(suffix)), "")
        reads_text = named is not None and bool(named.endings)
        if (not module or reads_text) and tables.ending_of(path, task) is not None:
            module = "tables"
        if not module:
            words = content_of(begin(path))
            hint = "" if words == "something else" else f" (it holds {words})"
            raise InputError(f"{path}: files with this ending are unknown{hint}; expected {formats()}")
    source = importlib.import_module(f"fedfm.data.sources.{module}")
    table: Table = source.read(path, spec, task=task, labelled=labelled)
    return table
