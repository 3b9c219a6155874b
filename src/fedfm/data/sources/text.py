"""Plain text (.txt, .txt.gz) for language models: one running text in consecutive passages."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedfm.data.sources._files import decode, gunzip, read_bytes
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table

PASSAGE = 2000  # characters at most


def read(path: Path, spec: DataSpec, *, task: str | None = None, labelled: bool = True) -> Table:
    """The file's text as consecutive passages of at most 2,000 characters.

    Raises:
        InputError: the file is empty, not UTF-8, not text, or damaged gzip.
    """
    data = read_bytes(path, "a text file")
    data = gunzip(data, path) if path.name.lower().endswith(".gz") else data
    text = decode(data, path, "plain text").replace("\r\n", "\n")
    passages = cut(text)
    split = np.full(len(passages), "train" if labelled else "test")
    return Table("passages", passages, None, (), split, source=str(path))


def cut(text: str, size: int = PASSAGE) -> list[str]:
    """Consecutive pieces of at most ``size`` characters, cut after a line break or a blank in the second half."""
    pieces = []
    start = 0
    while len(text) - start > size:
        marks = (text.rfind(mark, start + size // 2, start + size) for mark in "\n ")
        end = next((found + 1 for found in marks if found >= 0), start + size)
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]
