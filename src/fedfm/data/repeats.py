"""Find test and validation rows that are also training rows: equal rows, and rows stored or written differently.

Equal rows are found in every table. Texts count as the same if they differ only by case, white space, invisible
characters or the Unicode form of characters. Images and feature vectors count as the same if they are much closer to a
training row than training rows are to each other: for example the same image in another format, size or compression, or
the same vector with fewer digits.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.core import tasks
from fedfm.core.attachments import Attachment, attachments_of
from fedfm.data.invisible import is_invisible
from fedfm.data.table import Table, contents

_PROBED = 256  # number of first values of an array that are hashed
_SIDE = 16  # width and height of a thumbnail in pixels
_ROWS = 10_000  # largest number of rows of a table whose images or vectors are compared beyond equality
_BYTES = 1 << 27  # largest size of such a table in bytes, since its images must be decoded
_LEAST = 8  # smallest number of training rows that shows the usual distance between rows
_SAMPLE = 256  # number of training rows from which the usual distance to the nearest other row is taken
_NEAR = {"image": 0.2, "features": 1e-3}  # a row closer than this share of the usual distance is a repetition
_FEW = 4  # smallest length of vectors that are compared; shorter vectors may be close by chance
_PARTS = {"val": "validation", "test": "test"}


def of_training_rows(table: Table) -> str | None:
    """A notice about validation and test rows that are also training rows."""
    train = table.rows("train")
    if not len(train) or not comparable(table):
        return None
    found, more = [], []
    views = _Views(table)
    for split, word in _PARTS.items():
        rows = table.rows(split)
        if not len(rows):
            continue
        equal = _equal(table, train, rows)
        alike = np.setdiff1d(views.alike(train, rows), equal)
        if len(equal):
            found.append(f"{len(equal)} of {len(rows)} {word} rows")
        if len(alike):
            more.append(f"{len(alike)} of {len(rows)} {word} rows")
    said = []
    if found:
        said.append(f"{' and '.join(found)} are also training rows")
    if more:
        said.append(f"{' and '.join(more)} {_HOW.get(table.kind, _WORDING)}")
    return f"{'; '.join(said)}: on them a result only shows what was memorised" if said else None


def comparable(table: Table) -> bool:
    """Whether rows can be compared: not those of a user's own module, which are any objects."""
    if (of := tasks.row_kind(table.kind)) is None or of.wording or not len(table):
        return True
    return isinstance(table.inputs[0], str) or has_files(table)


def has_files(table: Table) -> bool:
    """Whether rows are files of images, or images with targets such as masks."""
    if table.kind == "image":
        return not isinstance(table.inputs, np.ndarray)
    of = tasks.row_kind(table.kind)
    item = table.inputs[0] if of is not None and not of.wording and len(table) else None
    return isinstance(item, tuple) and bool(item) and isinstance(item[0], Attachment)


def _file_of(item: Any) -> str | bytes:
    """The image of a row: its path, or the encoded image."""
    found: str | bytes = item[0].source if isinstance(item, tuple) else item
    return found


_WORDING = "are equal to training rows except for case, spaces or Unicode forms"
_HOW = {
    "text": _WORDING,
    "image": "look the same as a training image (stored in another format, size or compression)",
    "features": "are equal to training rows except for the last digits",
}


def _equal(table: Table, train: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The rows among ``rows`` (n,) whose input is exactly equal to the input of a training row."""
    both = np.concatenate([train, rows])
    probe = _probe(table)
    keys = np.fromiter((probe(table.inputs[int(i)]) for i in both), np.int64, len(both))
    likely = both[np.isin(keys, np.intersect1d(keys[: len(train)], keys[len(train) :]))]
    whole = np.array([_whole(table, table.inputs[int(i)]) for i in likely], dtype=np.int64)
    tested = np.isin(likely, rows)
    found: np.ndarray = likely[tested][np.isin(whole[tested], whole[~tested])]
    return found


def numbers_of(table: Table, rows: np.ndarray) -> np.ndarray:
    """A 64-bit number for each of ``rows`` (n,); equal rows have the same number, different rows only by chance."""
    probe = _probe(table)
    keys = np.fromiter((probe(table.inputs[int(i)]) for i in rows), np.int64, len(rows))
    if not isinstance(table.inputs, np.ndarray) and not has_files(table):
        return keys  # the hash of a text covers the complete text
    place, count = np.unique(keys, return_inverse=True, return_counts=True)[1:]
    for k in np.flatnonzero(count[place] > 1):
        keys[k] = _whole(table, table.inputs[int(rows[k])])
    return keys


def count_common(table: Table, rows: np.ndarray, other: Table, others: np.ndarray) -> int:
    """How many of ``rows`` (n,) of a table are equal to one of the rows ``others`` (m,) of another table."""

    def keys(of: Table, at: np.ndarray) -> np.ndarray:
        probe = _probe(of)
        return np.fromiter((probe(of.inputs[int(i)]) for i in at), np.int64, len(at))

    mine, theirs = keys(table, rows), keys(other, others)
    known = {_whole(other, other.inputs[int(i)]) for i in others[np.isin(theirs, mine)]}
    return sum(_whole(table, table.inputs[int(i)]) in known for i in rows[np.isin(mine, theirs)])


def _probe(table: Table) -> Callable[[Any], int]:
    """A cheap hash of an input: a file's size, or an array's first values."""
    if has_files(table):
        return lambda item: hash(of) if isinstance(of := _file_of(item), bytes) else os.path.getsize(of)
    if isinstance(table.inputs, np.ndarray):
        return lambda row: hash(row.reshape(-1)[:_PROBED].tobytes())
    return hash


def _whole(table: Table, item: Any) -> int:
    """A 64-bit hash of a complete input."""
    if isinstance(item, np.ndarray):
        return hash(item.tobytes())
    if not has_files(table):
        return hash(item)
    return hash(of if isinstance(of := _file_of(item), bytes) else Path(of).read_bytes())


class _Views:
    """Hashes, thumbnails or vectors by which a table's inputs are compared; they are computed once per table."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._seen: np.ndarray | None = None
        self._done = False

    def alike(self, train: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The rows among ``rows`` that look like a training row."""
        if not self._done:
            self._seen, self._done = _view(self._table), True
        if self._seen is None:
            return rows[:0]
        if self._seen.ndim == 1:
            found: np.ndarray = rows[np.isin(self._seen[rows], self._seen[train])]
            return found
        return _near(self._seen, train, rows, _NEAR[self._table.kind])


def _view(table: Table) -> np.ndarray | None:
    """For each row a hash of its wording (N,), or its thumbnail or vector (N, d); None if there are too many rows."""
    if table.kind == "text" or ((of := tasks.row_kind(table.kind)) is not None and of.wording):
        return np.fromiter((hash(_wording(item)) for item in table.inputs), np.int64, len(table))
    if len(table) > _ROWS or table.kind not in _NEAR:
        return None
    if table.kind == "features":
        x: np.ndarray = table.inputs
        return x if x.shape[1] >= _FEW and x.nbytes <= _BYTES else None
    if isinstance(table.inputs, np.ndarray):
        if table.inputs.nbytes > _BYTES:
            return None
    elif sum(len(i) if isinstance(i, bytes) else os.path.getsize(i) for i in table.inputs) > _BYTES:
        return None
    with ThreadPoolExecutor(4) as pool:  # Pillow decodes outside the interpreter's lock
        return np.stack(list(pool.map(_thumbnail, table.inputs)))


def _wording(item: Any) -> tuple[str, ...]:
    """The texts of a row without the differences that a reader does not notice, and the hashes of its attachments."""
    return (*(_read(text) for text in contents(item)), *(file.sha256 for file in attachments_of(item)))


def _read(text: str) -> str:
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKC", text) if not is_invisible(c))
    return " ".join(text.casefold().split())


def _thumbnail(item: Any) -> np.ndarray:
    """Grey values (256,) float32 of an image at 16 x 16 pixels; to save time, a JPEG is decoded at a reduced size."""
    from PIL import Image

    from fedfm.data.thumbnails import small

    grey = small(item, 4 * _SIDE).convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    return np.asarray(grey, dtype=np.float32).reshape(-1)


def _near(views: np.ndarray, train: np.ndarray, rows: np.ndarray, share: float) -> np.ndarray:
    """Those of ``rows`` that are nearer to a training row than ``share`` times the training rows' usual distance."""
    if len(train) < _LEAST:
        return rows[:0]
    centre = views[train].mean(axis=0, dtype=np.float64)
    known = views[train] - centre  # (n, d) float64, so that small distances of long vectors are exact
    some = np.linspace(0, len(train) - 1, min(_SAMPLE, len(train))).astype(np.int64)
    apart = _distances(known[some], known)
    apart[np.arange(len(some)), some] = np.inf
    usual = float(np.median(apart.min(axis=1)))
    if not 0 < usual < np.inf:
        return rows[:0]
    near = [
        _distances(views[part] - centre, known).min(axis=1) < share * usual
        for part in np.array_split(rows, -(-len(rows) // _SAMPLE))
    ]
    found: np.ndarray = rows[np.concatenate(near)]
    return found


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Distances (n, m) between the rows of a (n, d) and the rows of b (m, d)."""
    square = (a * a).sum(1)[:, None] + (b * b).sum(1)[None] - 2 * (a @ b.T)
    found: np.ndarray = np.sqrt(np.maximum(square, 0.0))
    return found
