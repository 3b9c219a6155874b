"""Data sets from Python programs: any object with ``len(d)`` and ``d[i]``. Rows are read when a batch needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Batch, Rows
from fedfm.data.table import Table
from fedfm.errors import InputError

_READ = 256  # rows per batch of read_once


@dataclass(frozen=True)
class DatasetRows(Rows):
    """Rows of a data set; they are read and collated when a batch needs them."""

    table: Table | None = None
    index: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    collate: Callable[[list[Any]], Batch] = dict

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: Sequence[int] | np.ndarray | Tensor) -> DatasetRows:
        return replace(self, index=self.index[np.asarray(index, dtype=np.int64)])

    def batch(self, index: Sequence[int] | np.ndarray | Tensor) -> Batch:
        assert self.table is not None  # noqa: S101 - all callers set it
        return self.collate([self.table.inputs[i] for i in self.take(index).index.tolist()])


class Joined(Sequence[Any]):
    """The concatenation of several data sets."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(p) for p in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: Any) -> Any:
        part = int(np.searchsorted(self._ends, i, side="right"))
        return self._parts[part][int(i) - (int(self._ends[part - 1]) if part else 0)]


def check_dataset(data: Any, what: str, *, empty: bool = False) -> Any:
    """Return ``data``; raise an InputError if it is not a map-style data set, or has no rows and ``empty`` is False."""
    if isinstance(data, (str, bytes, Mapping)) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InputError(f"{what} is a {type(data).__name__}: expected a map-style data set, with len() and [i]")
    if not len(data) and not empty:
        raise InputError(f"{what} has no rows")
    return data


def read_once(rows: DatasetRows) -> tuple[np.ndarray | None, int | None]:
    """Read all rows once: (class labels (n,), index of the first row with a NaN).

    The labels are None unless each row's target is one integer of at least 0. Reading ends early if the rows have
    neither labels nor floating-point numbers.
    """
    found: list[np.ndarray] | None = []
    first, at = None, 0
    with torch.random.fork_rng(devices=[]):
        for batch in rows.batches(_READ):
            y = batch.get("labels")
            if (
                not isinstance(y, Tensor)
                or y.dim() != 1
                or y.is_floating_point()
                or y.dtype == torch.bool
                or int(y.min()) < 0
            ):
                found = None
            if found is not None and isinstance(y, Tensor):
                found.append(y.cpu().numpy().astype(np.int64))
            floats = [x for x in batch.values() if isinstance(x, Tensor) and x.is_floating_point()]
            if first is None:
                # The sum is a fast first test: a NaN makes it NaN, and so do infinities of both signs.
                n = min(_READ, len(rows) - at)
                rowwise = [x for x in floats if x.dim() and len(x) == n]  # a collate function may join rows
                bad = next((x for x in rowwise if torch.isnan(x.sum()) and torch.isnan(x).any()), None)
                if bad is not None:
                    first = at + int(torch.isnan(bad).reshape(n, -1).any(1).nonzero()[0])
            if found is None and (first is not None or not floats):
                break
            at += _READ
    return None if found is None else np.concatenate(found), first


def column(sets: Sequence[Any], name: str) -> dict[str, np.ndarray]:
    """{name: the column's texts or integers, as strings}; {} unless each (Hugging Face) data set has this column."""
    if not all(name in (getattr(data, "column_names", None) or ()) for data in sets):
        return {}
    values = [v for data in sets for v in data[name]]
    if not all(isinstance(v, (str, int)) for v in values):
        raise InputError(f'data.partition.column: "{name}" holds neither text nor integers')
    return {name: np.array([str(v) for v in values])}
