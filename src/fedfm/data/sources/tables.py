"""Read files of rows by the endings of their names, and folders with a file for each split."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedfm.core import tasks
from fedfm.core.text import listing
from fedfm.data.sources._files import decode, gunzip, read_bytes, visible_entries
from fedfm.data.sources._sheet import Sheet, join
from fedfm.data.sources._splits import SPLIT_NAMES, other_marks, with_test
from fedfm.data.sources._tabular import refuse_absent, to_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.data.task_rows import row_task
from fedfm.errors import InputError

# ending -> (module, name of its function, description of the expected content)
_READERS = {
    ".csv": ("csv", "sheet_of", "a CSV file"),
    ".tsv": ("csv", "sheet_of_tabs", "a TSV file"),
    ".jsonl": ("jsonl", "sheet_of", "a JSON lines file"),
    ".ndjson": ("jsonl", "sheet_of", "a JSON lines file"),
    ".json": ("json", "sheet_of", "a JSON file"),
    ".parquet": ("parquet", "sheet_of", "a Parquet file"),
}
_TEXT = ".txt"  # only some tasks read such a file as a table
_ASIDE = re.compile(
    r"metadata\.|classes\.json|dataset_infos?\.|dataset_dict\.|config\.", re.IGNORECASE
)  # files about the rows
_DATA = re.compile(
    r"\.(?:xlsx?|ods|arrow|feather|orc|avro|npy|npz|pkl|pickle|pt|h5|hdf5|mat|sa[v]|dta|rds|rdata|db|sqlite3?|tfrecord"
    r"|zip|tar|tgz|7z|bz2|xz|zst|dat|data|arff)$",
    re.IGNORECASE,
)
_CODE = re.compile(r"\.(?:py|sh|ipynb|md|rst|html?|pdf|ya?ml|toml|log|png|jpe?g|svg)$", re.IGNORECASE)
_WORD = re.compile(r"[a-z]+")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.)")


def ending_of(path: Path, task: str | None = None) -> str | None:
    """The ending of a file of rows, without ".gz"; None if files with such a name are not read as tables.

    Some endings belong to a single task. The ending ".txt" counts only if the named task reads such files as tables.
    """
    name = path.name.lower()
    plain = name.removesuffix(".gz")
    found = next((ending for ending in _endings(task) if plain.endswith(ending)), None)
    return None if found == ".parquet" and plain != name else found


def _endings(task: str | None) -> Iterator[str]:
    yield from _READERS
    named = tasks.task_named(task)
    if named is not None and named.endings:
        yield from (*named.endings, _TEXT)
    yield from tasks.endings()


def sheet_of(path: Path, task: str | None = None) -> Sheet:
    """The columns of a file.

    Args:
        task: the name of a task; some tasks read plain text.

    Raises:
        InputError: the file is empty, damaged, or not of the kind that its ending names.
    """
    packed, ending = path.name.lower().endswith(".gz"), ending_of(path, task) or ""
    owner = None if ending in _READERS else tasks.task_named(task) if ending == _TEXT else tasks.reads(ending)
    module, function, holds = _READERS.get(ending, ("", "", "a text file"))
    data = read_bytes(path, holds)
    if packed:
        data = gunzip(data, path)
        if not data:
            raise InputError(f"{path} is empty once decompressed: {holds} is expected")
    if owner is not None:
        return row_task(owner).sheet(decode(data, path, holds), str(path))
    reader = getattr(importlib.import_module(f"fedfm.data.sources.{module}"), function)
    sheet: Sheet = reader(data, path)
    return sheet


def read(path: Path, spec: DataSpec, *, task: str | None = None, labelled: bool = True) -> Table:
    """Table of a file.

    Raises:
        InputError: as :func:`sheet_of` and ``to_table``.
    """
    sheet = sheet_of(path, task)
    table = to_table(sheet, spec, source=str(path), task=task, labelled=labelled)
    shard = _SHARD.search(path.name)
    if shard is None or int(shard[2]) < 2:
        return table
    note = f"{path} is one of {int(shard[2])} parts: name a folder with all of them to read the complete set"
    return replace(table, notices=(note, *table.notices))


def files_of(folder: Path, task: str | None = None) -> list[Path]:
    """The files of rows in a folder or in its folder ``data``; [] if there are none, or if there are other folders."""
    for home in (folder, folder / "data"):
        if not home.is_dir():
            continue
        entries = visible_entries(home)
        found = [p for p in entries if p.is_file() and is_table(p, task)]
        inside = [p for p in entries if p.is_dir() and not (found == [] and p.name == "data")]
        if found and not inside:
            return found
        if inside:
            return []
    return []


def read_folder(folder: Path, files: list[Path], spec: DataSpec, *, task: str | None, labelled: bool) -> Table:
    """Table of all files of a folder; file names give the split, as in ``train-00000-of-00002`` on the Hub.

    Raises:
        InputError: only some files name a split, their columns differ, or as :func:`read`.
    """
    _complete(files)
    splits = {file: split_in(file.name) for file in files}
    unknown = [file.name for file, split in splits.items() if split is None]
    if unknown and len(unknown) < len(files) and labelled:
        word = "names" if len(unknown) == 1 else "name"
        raise InputError(
            f"{folder}: {listing(unknown, 4)} {word} no split, but other files there do: expected names with train, "
            "validation or test"
        )
    sheets = {file: sheet_of(file, task) for file in files}
    notices: tuple[str, ...] = ()
    if labelled:
        for file in [f for f, sheet in sheets.items() if len(sheets) > 1 and _has_withheld_labels(sheet, spec.label)]:
            del sheets[file]
            notices += (f"{file} has no labels (-1) and was left out",)
    if not sheets:
        raise InputError(f'{folder}: no file has labels in its column "{spec.label}" (-1 marks withheld labels)')
    notices += _left_out(files)
    notices += _notices_of_files(folder, {file: splits[file] or "train" for file in sheets}) if labelled else ()
    sheet = join({str(file): one for file, one in sheets.items()})
    if not unknown and labelled:
        marks = [str(splits[file]) for file, one in sheets.items() for _ in range(len(one))]
        refuse_absent(sheet.columns, spec, "split", str(folder))
        notices += other_marks(sheet.columns.get(spec.split), marks, spec.split, str(folder))
        marks, more = with_test(marks, str(folder))
        notices += more
        sheet = replace(sheet, columns={**sheet.columns, spec.split: marks})
    sheet = replace(sheet, notices=(*sheet.notices, *notices))
    return to_table(sheet, spec, source=str(folder), task=task, labelled=labelled)


def _notices_of_files(folder: Path, splits: Mapping[Path, str]) -> tuple[str, ...]:
    """A notice about each split that is read from several files, unless they are numbered parts of one file."""
    found = []
    for split in dict.fromkeys(splits.values()):
        names = sorted({_SHARD.sub("", file.name) for file, of in splits.items() if of == split})
        if len(names) > 1:
            found.append(f"the {split} rows of {folder} are the rows of {listing(names, 6)}, one file after the other")
    return tuple(found)


def _left_out(files: Sequence[Path]) -> tuple[str, ...]:
    """A notice about unread files in the same folder whose names suggest that they hold rows, too."""
    there = [
        file for file in sorted(files[0].parent.iterdir()) if file.is_file() and not file.name.startswith((".", "_"))
    ]
    found = [
        file.name
        for file in there
        if file not in files
        and not _ASIDE.match(file.name)
        and (_DATA.search(file.name) or (split_in(file.name) and not _CODE.search(file.name)))
    ]
    if not found:
        return ()
    what = "is not read: if it has rows, save it" if len(found) == 1 else "are not read: if they have rows, save them"
    return (f"{listing(found, 4)} in {files[0].parent} {what} in the form of the other files",)


def _has_withheld_labels(sheet: Sheet, label: str) -> bool:
    """Whether all labels are -1, which marks withheld labels in data sets of the Hub."""
    return len(sheet) > 0 and set(map(str, sheet.columns.get(label, ()))) == {"-1"}


def split_in(name: str) -> str | None:
    """The split that the words of a file's name give; None if they give none, or several.

    Example:
        >>> split_in("cats-validation-00000-of-00001.parquet"), split_in("cats.csv")
        ('val', None)
    """
    found = {SPLIT_NAMES[word] for word in _WORD.findall(name.lower()) if word in SPLIT_NAMES}
    return found.pop() if len(found) == 1 else None


def is_table(path: Path, task: str | None = None) -> bool:
    """Whether the name is that of a file of rows, and not of a file about rows."""
    return not _ASIDE.match(path.name) and ending_of(path, task) is not None


def _complete(files: Iterable[Path]) -> None:
    """Raise an InputError if one of the numbered parts of a file is missing."""
    sets: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if shard := _SHARD.search(file.name):
            sets.setdefault((_SHARD.sub("", file.name), int(shard[2])), set()).add(int(shard[1]))
    for (name, count), there in sets.items():
        if missing := sorted(set(range(count)) - there):
            raise InputError(f"{name}: part {missing[0]:05d} of {count} is not in the folder: download it, too")
