"""Read plain text (.txt, .txt.gz) for language models: one running text in consecutive passages."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfm.core.text import listing
from fedfm.data.sources._files import decode, gunzip, read_bytes
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table

PASSAGE = 2000  # largest number of characters of a passage
_LOOK = 20_000  # number of characters that are examined for rows of a table
_LINES = 5  # smallest number of lines that may be rows of a table


def read(path: Path, spec: DataSpec, *, task: str | None = None, labelled: bool = True) -> Table:
    """The file's text as consecutive passages of at most 2,000 characters.

    Raises:
        InputError: the file is empty, not UTF-8, not text, or damaged gzip.
    """
    data = read_bytes(path, "a text file")
    data = gunzip(data, path) if path.name.lower().endswith(".gz") else data
    text = decode(data, path, "plain text").replace("\r\n", "\n").replace("\r", "\n")
    passages = cut(text)
    split = np.full(len(passages), "train" if labelled else "test")
    notices = (note,) if (note := _table_note(text, path)) else ()
    return Table("passages", passages, None, (), split, source=str(path), notices=notices)


def _table_note(text: str, path: Path) -> str | None:
    """A notice if the lines are rows of a table or of JSON, whose separators and labels would be learned as text."""
    lines = [line for line in text[:_LOOK].split("\n") if line.strip()][:-1]
    if len(lines) < _LINES:
        return None
    form, ending = "", ""
    if all(line.startswith("{") and line.rstrip().endswith("}") for line in lines):
        form, ending = "objects of JSON", ".jsonl"
    for mark, name in ((",", ".csv"), (";", ".csv"), ("\t", ".tsv")):
        counts = {line.count(mark) for line in lines}
        names = [cell.strip(' "') for cell in lines[0].split(mark)]
        if len(counts) == 1 and counts != {0} and all(map(str.isidentifier, names)):
            form, ending = f"rows below the names of columns ({listing(names, 4)})", name
    if not form:
        return None
    return f"the lines of {path} are {form} and are read as running text: end its name in {ending} to read a table"


def cut(text: str, size: int = PASSAGE) -> list[str]:
    """Consecutive pieces of at most ``size`` characters, cut after a line break or a blank in a piece's second half."""
    pieces = []
    start = 0
    while len(text) - start > size:
        marks = (text.rfind(mark, start + size // 2, start + size) for mark in "\n ")
        end = next((found + 1 for found in marks if found >= 0), start + size)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]
