"""Names of splits in folders, files and data sets of the Hugging Face Hub."""

from __future__ import annotations

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
