"""Properties of rows as memberships in fixed groups, so that sums over rows are counts.

Every property has a matrix (n, G): entry 1 if the row is in the group. The groups depend on the experiment alone, so
that server and silos have the same ones whatever the rows. A task whose rows have no single class says by
:class:`TargetGroups` into which groups its targets fall.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedfm.core.attachments import Attachment, attachments_of
from fedfm.core.task_facts import TaskFacts
from fedfm.data.table import Table, contents
from fedfm.models.model import Model
from fedfm.models.preprocessing import labels_of

Members = NDArray[np.float64]

TARGETS = "targets"
_NO_TEXT = ("", "nan", "<na>", "n/a", "#n/a", "null", "none")  # what tables write for an empty cell
_MARKS = (-99, -999, -9999, -99999, -999999)  # what tables write for a missing number; larger ones may be values
_FILL = 1e15  # absolute value from which a number is a fill value, such as 1e20 or -3.4e38
_COMPLETE, _EMPTY, _BLANK, _MARKED, _UNLABELLED = range(5)
_MISSING = (
    "nothing missing",
    "an empty text",
    "a picture of one colour",
    "a mark of a missing number",
    "no target",
)
_DRAFT = 16  # smallest side at which a JPEG is decoded to see whether it has one colour


@runtime_checkable
class TargetGroups(Protocol):
    """A task whose targets are not one class a row."""

    def target_groups(self, classes: Sequence[str]) -> tuple[tuple[str, ...], int]:
        """Names of the groups, and the largest number of groups of one row."""

    def group_members(self, table: Table, classes: Sequence[str]) -> Members:
        """The rows' memberships (n, G): 1 or 0."""


@dataclass(frozen=True)
class RowProperty:
    """A property of rows.

    Attributes:
        name: its name in figures.
        groups: names of its G groups.
        most: the largest number of groups of one row.
        members: the memberships (n, G), from the rows.
    """

    name: str
    groups: tuple[str, ...]
    most: int
    members: Callable[[Table], Members]


def properties_of(model: Model, length_bins: Sequence[int], side_bins: Sequence[int]) -> tuple[RowProperty, ...]:
    """The properties of the rows of a model, in order.

    A text has a number of characters, and a picture its stored width and height. Which of them there are follows from
    the model's tools, which server and silos share.

    Args:
        length_bins, side_bins: ascending edges of bins, for characters and for pixels.
    """
    task, classes, tools = model.task, model.classes, model.tools
    groups, most = _target_groups(task, classes)
    found = [RowProperty(TARGETS, groups, most, lambda table: _target_members(task, table, classes))] if groups else []
    if tools.tokenizer is not None:
        bins = bin_names(length_bins)
        found += [
            RowProperty("characters", bins, 1, lambda table: into_bins(_lengths(table)[:, 0], length_bins)),
            RowProperty("characters_of_answer", bins, 1, lambda table: into_bins(_lengths(table)[:, 1], length_bins)),
        ]
    if tools.image is not None or tools.processor is not None:
        bins = bin_names(side_bins)
        found += [
            RowProperty("width", bins, 1, lambda table: into_bins(_sides(table)[:, 0], side_bins)),
            RowProperty("height", bins, 1, lambda table: into_bins(_sides(table)[:, 1], side_bins)),
        ]
    targets: Callable[[Table], Members] | None = found[0].members if groups else None
    return (*found, RowProperty("missing", _MISSING, 1, lambda table: _missing(table, targets)))


def bin_names(edges: Sequence[float]) -> tuple[str, ...]:
    """Names of the bins between ascending edges, and of the two outer bins.

    Example:
        >>> bin_names((10, 20))
        ('below 10', '10 to below 20', '20 or more')
    """
    inner = (f"{low:g} to below {high:g}" for low, high in itertools.pairwise(edges))
    return (f"below {edges[0]:g}", *inner, f"{edges[-1]:g} or more")


def into_bins(values: NDArray[np.float64], edges: Sequence[float]) -> Members:
    """Memberships (n, B) of values (n,) in bins; a NaN is in no bin.

    Example:
        >>> into_bins(np.array([10.0, 3.0, np.nan]), (10, 20)).tolist()
        [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """
    found = np.eye(len(edges) + 1)[np.searchsorted(np.asarray(edges), values, side="right")]
    found[np.isnan(values)] = 0.0
    return np.asarray(found)


# --- targets ----------------------------------------------------------------------------------------------------------
def _target_groups(task: TaskFacts, classes: Sequence[str]) -> tuple[tuple[str, ...], int]:
    if isinstance(task, TargetGroups):
        return task.target_groups(classes)
    return (tuple(classes), 1) if task.one_class_a_row else ((), 0)


def _target_members(task: TaskFacts, table: Table, classes: tuple[str, ...]) -> Members:
    if isinstance(task, TargetGroups):
        return task.group_members(table, classes)
    labels = labels_of(table, classes)
    return np.zeros((len(table), len(classes))) if labels is None else np.eye(len(classes))[labels.numpy()]


# --- inputs -----------------------------------------------------------------------------------------------------------
def _lengths(table: Table) -> NDArray[np.float64]:
    """Characters (n, 2) of a row's first part, and of all further parts that are not tags; NaN for a part without text.

    The second is the answer, or what belongs to an anchor.
    """
    found = np.full((len(table), 2), np.nan)
    for i, parts in enumerate(map(list, map(_parts, _items(table)))):
        for j, texts in enumerate(parts[:2]):
            if texts:
                found[i, j] = sum(map(len, texts))
    return found


def _items(table: Table) -> Sequence[Any]:
    return () if isinstance(table.inputs, np.ndarray) or table.kind in ("image", "own") else table.inputs


def _parts(item: Any) -> list[list[str]]:
    """The texts of a row's first part, and those of its further parts."""
    if isinstance(item, str):
        return [[item]]
    rest = [part for part in item[1:] if not _is_list_of_words(part)]
    return [list(contents(item[:1])), list(contents(rest))]


def _is_list_of_words(part: Any) -> bool:
    return isinstance(part, tuple | list) and all(isinstance(word, str) for word in part)


def _pictures(table: Table) -> list[Any]:
    """A row's picture, or that of its first file, in the form that NumPy or Pillow reads; None without one."""
    if table.kind == "image":
        return list(table.inputs)
    files = [next(attachments_of(item), None) for item in _items(table)] or [None] * len(table)
    return [None if file is None or not _is_picture(file) else file.source for file in files]


def _is_picture(file: Attachment) -> bool:
    """Whether Pillow knows the file; a recording is not a picture."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(file.source) if isinstance(file.source, bytes) else file.source):
            return True
    except UnidentifiedImageError:
        return False


def _sides(table: Table) -> NDArray[np.float64]:
    """Stored width and height (n, 2) of the rows' pictures; NaN for a row without one."""
    from fedfm.data.thumbnails import size_of

    pictures = _pictures(table)
    return np.array([(np.nan, np.nan) if item is None else size_of(item) for item in pictures]).reshape(-1, 2)


def _missing(table: Table, targets: Callable[[Table], Members] | None) -> Members:
    """What a row lacks, (n, 5); of several things the first in the order of the groups."""
    found = np.full(len(table), _COMPLETE)
    if targets is not None:
        found[targets(table).sum(1) == 0] = _UNLABELLED
    if table.kind == "features":
        x = np.asarray(table.inputs)
        found[(np.isin(x, _MARKS) | ~(np.abs(x) < _FILL)).any(1)] = _MARKED
    with ThreadPoolExecutor(4) as pool:  # Pillow decodes outside the interpreter's lock
        found[np.array(list(pool.map(_has_one_colour, _pictures(table))), dtype=bool)] = _BLANK
    for i, parts in enumerate(map(_parts, _items(table))):
        if any(texts and all(text.strip().lower() in _NO_TEXT for text in texts) for texts in parts):
            found[i] = _EMPTY
    return np.asarray(np.eye(len(_MISSING))[found])


def _has_one_colour(item: Any) -> bool:
    from fedfm.data.thumbnails import small

    pixels = None if item is None else np.asarray(small(item, _DRAFT))
    return pixels is not None and bool((pixels == pixels[:1, :1]).all())
