"""Names of splits in folders, files and data sets of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.core.text import listing

SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "validation", "valid", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


def with_test(marks: list[str], source: str) -> tuple[list[str], tuple[str, ...]]:
    """Return (the rows' splits, notices). If there are no test rows, validation rows become test rows."""
    if set(marks) != {"train", "val"}:
        return marks, ()
    note = f"{source} has no test split with labels: its validation rows are the test rows"
    return ["test" if mark == "val" else mark for mark in marks], (note,)


def joined_splits(named: Mapping[str, str | None], source: str) -> tuple[str, ...]:
    """Notices about each split that is read from several folders or splits of a set, such as train and training.

    Args:
        named: name of a folder or of a split of the set -> the split that its rows become.
    """
    found: dict[str, list[str]] = {}
    for name, split in named.items():
        if split is not None:
            found.setdefault(split, []).append(name)
    return tuple(
        f"the {split} rows of {source} are the rows of {listing(names)}" for split, names in found.items() if names[1:]
    )


def other_marks(values: Sequence[Any] | None, marks: Sequence[str], name: str, source: str) -> tuple[str, ...]:
    """A notice if a column of splits says otherwise than the names of folders or files, which count.

    Args:
        values: the column's values (N,); None if there is no such column.
        marks: the split of each row (N,) by the name of its folder or file.
        name: the column's name.
    """
    if values is None:
        return ()
    pairs = zip(values, marks, strict=True)
    other = sum(SPLIT_NAMES.get(str(value).strip().lower(), value) != mark for value, mark in pairs)
    if not other:
        return ()
    return (
        f'column "{name}" of {source} is not read, since the names of folders or files give the splits: it has another '
        f"split for {other} of {len(marks)} rows",
    )
