"""Record coarse properties of the rows that a run has read, and compare later rows with them.

A model is valid only for rows that are like its training rows. Rows in other units, with columns in another order, or
in another language also give probabilities, which look normal. So a run records such properties, and a prediction
compares its rows with them. Quantities are rounded to an eighth of their range, and shares to tenths, so that no
property reveals a single row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedfm.core import tasks
from fedfm.core.text import listing
from fedfm.data import thumbnails
from fedfm.data.class_names import class_name
from fedfm.data.partition import CLIENT
from fedfm.data.table import Table
from fedfm.errors import InputError

Profile = Mapping[str, Any]

_LOOKED_AT = 2000  # largest number of feature vectors that are examined
_COLUMNS = 4096  # largest number of columns whose ranges are recorded separately
_TAIL = 0.02  # share of the values below a range, and of the values above it
_CELLS = 8  # a range is rounded to a grid of at least this many steps
_FEW, _MANY = 8, 20  # smallest numbers of rows for a comparison; some comparisons need the larger number
_OUTSIDE = 0.35  # largest share of values outside the training range without a notice
# Largest ratio of two ranges' widths without a notice: for the median column, and for a single column
_ALL_WIDER, _WIDER = 8.0, 50.0
_COMPARED = 20  # largest number of clients that are compared
_SIGNS = 0.4  # largest difference of the shares of negative values without a notice
_SHADE = 0.35  # largest difference of brightness (from 0 to 1) without a notice
_FURTHER = ("input", "system", "tools")  # keys of columns that extend an instruction
_MIRROR = 0.15  # two sets of images are probably inverses if the sum of their brightnesses is this close to 1
_LARGER = 4.0  # a notice needs at least this ratio of the sides of images


def profile_of(table: Table, images: np.ndarray | None = None) -> dict[str, Any]:
    """The properties of a table's rows, as JSON values.

    Args:
        images: the result of :func:`fedfm.data.thumbnails.figures` if the rows are images.
    """
    found: dict[str, Any] = {"read": list(table.read)}
    if table.kind == "features" and len(table):
        x = _some(table)
        found |= {"names": list(table.names), "all": _grid(_range(x.reshape(-1, 1)))}
        found["negative"] = round(float((x < 0).mean()), 1)
        if x.shape[1] <= _COLUMNS:
            found["columns"] = _grid(_range(x))
    elif images is not None and len(images):
        found["images"] = _of_images(images)
    elif _has_words(table):
        from fedfm.data import wording

        found["texts"] = wording.habits(table)
    return found


def with_profile(table: Table, images: np.ndarray | None) -> Table:
    """The table with its profile, and with notices about clients whose rows differ from those of the others."""
    more = between_clients(table) if CLIENT in table.columns else []
    return replace(table, profile=profile_of(table, images), notices=(*table.notices, *more))


def compare(
    trained: Profile, table: Table, images: np.ndarray | None = None, of: str = "the training rows"
) -> list[str]:
    """Notices about the ways in which a table's rows differ from the rows that a run has read.

    Args:
        trained: the result of :func:`profile_of` for the run's rows.
        images: as in :func:`profile_of`, for this table.
        of: the words for the run's rows in messages.

    Raises:
        InputError: the feature columns have other names, or the same names in another order.
    """
    said = [_fewer_columns(trained, table)]
    if table.kind == "features" and len(table):
        check_names(trained.get("names", ()), table.names, table.source, of)
        said.append(_other_ranges(trained, table))
    elif images is not None and len(images) and "images" in trained:
        said += _other_images(trained["images"], _of_images(images), len(images), table.source, CLIENT in table.columns)
    elif _has_words(table) and "texts" in trained:
        from fedfm.data import wording

        said += wording.differences(trained["texts"], wording.habits(table), table.source)
    return [text.replace("the training rows", of) for text in said if text]


def check_names(wanted: Sequence[str], given: Sequence[str], source: str, of: str) -> None:
    """Compare two lists of names of feature columns, unless one of them is empty.

    Raises:
        InputError: the names differ, or are in another order.
    """
    if not wanted or not given or list(wanted) == list(given):
        return
    j = next((j for j, (a, b) in enumerate(zip(wanted, given, strict=False)) if a != b), min(len(wanted), len(given)))
    if set(wanted) == set(given):
        raise InputError(
            f'{source}: column x[:, {j}] is "{given[j]}", and in {of} it is "{wanted[j]}": the columns are in another '
            "order; put them in the same order"
        )
    missing = [name for name in wanted if name not in given]
    strange = [name for name in given if name not in wanted]
    raise InputError(
        f"{source}: the columns of x are not those of {of}: missing {listing(missing, 4) or 'none'}, "
        f"unknown {listing(strange, 4) or 'none'}"
    )


def between_clients(table: Table) -> list[str]:
    """Notices about clients whose rows (feature vectors or images) differ from the rows of the largest client."""
    names, counts = np.unique(table.columns[CLIENT], return_counts=True)
    if table.kind not in ("features", "image") or not 2 <= len(names) <= _COMPARED:
        return []
    first = names[counts.argmax()]

    def rows_of(name: str, label: int | None) -> tuple[Table, np.ndarray | None]:
        mine = table.columns[CLIENT] == name
        if label is not None and table.labels is not None:
            mine &= table.labels == label
        rows = replace(table.take(np.flatnonzero(mine)), source=str(name))
        return rows, thumbnails.figures(rows) if table.kind == "image" else None

    found: list[str] = []
    for name in names:
        label = _shared_class(table, first, name)
        if name != first and label is not None:
            found += compare(profile_of(*rows_of(first, label)), *rows_of(name, label), str(first))
    return found


def _shared_class(table: Table, one: str, other: str) -> int | None:
    """The class of which both clients have the most rows, at least ``_FEW`` each; None if there is no such class.

    Rows are compared within one class, since clients also differ in their shares of classes.
    """
    if table.labels is None:
        return None
    counts = [
        np.bincount(table.labels[table.columns[CLIENT] == name], minlength=len(table.classes)) for name in (one, other)
    ]
    both = np.minimum(*counts)
    return int(both.argmax()) if both.max() >= _FEW else None


def unknown_classes(table: Table, label: str, classes: Sequence[str]) -> str | None:
    """A notice about rows to predict whose label is not a class of the model.

    Args:
        label: name of the column of labels; predictions do not read it.
        classes: the model's classes.
    """
    given = Counter(class_name(value) for value in table.columns.get(label, ()) if value.strip())
    numbers = all(name.removesuffix(".0").isdigit() and float(name) < len(classes) for name in given)
    if numbers and not all(name.isdigit() for name in classes):  # the labels are numbers of the classes
        return None
    known = {name.casefold() for name in classes}
    strange = {name: n for name, n in given.items() if not {name.casefold(), name.removesuffix(".0")} & known}
    if not strange or not classes:
        return None
    return (
        f'{sum(strange.values())} of {len(table)} rows of {table.source} have a label (column "{label}") that is not a '
        f"class of the model, such as {listing(sorted(strange), 4)}: the model still assigns one of its own classes"
    )


def _has_words(table: Table) -> bool:
    of = tasks.row_kind(table.kind)
    return table.kind == "text" or (of is not None and of.wording)


def _fewer_columns(trained: Profile, table: Table) -> str | None:
    """A notice about columns that were part of the run's inputs, and that these rows lack."""
    if "messages" in table.read:  # conversations contain these parts
        return None
    missing = [f"data.{key}" for key in trained.get("read", ()) if key in _FURTHER and key not in table.read]
    if not missing:
        return None
    return (
        f"{table.source} has no column {' and '.join(missing)}, which the training rows have: the model gets less "
        "input than in training"
    )


# --- feature vectors --------------------------------------------------------------------------------------------------


def _some(table: Table) -> np.ndarray:
    """Up to 2,000 rows (n, d), at equal distances in the table."""
    places = np.unique(np.linspace(0, len(table) - 1, _LOOKED_AT).astype(np.int64))
    return np.asarray(table.inputs[places], dtype=np.float64)


def _range(x: np.ndarray) -> np.ndarray:
    """The lowest and highest value (2, d) of each column, without the most extreme 2 % at each end."""
    found: np.ndarray = np.quantile(x, [_TAIL, 1 - _TAIL], axis=0, method="nearest")
    return found


def _grid(ends: np.ndarray) -> list[list[float]]:
    """The range [low, high] of each column, widened to a grid whose step is at most an eighth of the range."""
    low, high = ends
    size = np.where(high > low, high - low, np.maximum(np.abs(high), 1e-6))
    step = 2.0 ** np.floor(np.log2(size / _CELLS))
    low, high = np.floor(low / step) * step, np.ceil(high / step) * step
    return [[float(a), float(b)] for a, b in zip(low, high, strict=True)]


def _other_ranges(trained: Profile, table: Table) -> str | None:
    """A notice if the values have another scale, or if some columns have another range."""
    if "all" not in trained:
        return None
    x = _some(table)
    known = np.array(trained.get("columns", ()), np.float64).reshape(-1, 2).T  # (2, d)
    (low, high), (low_now, high_now) = trained["all"][0], _range(x.reshape(-1, 1))[:, 0]
    if known.shape[1] != x.shape[1]:
        known = np.repeat(np.array(trained["all"]).T, x.shape[1], axis=1)
    width = known[1] - known[0]
    now = _range(x)
    wide = now[1] - now[0]
    both = (width > 0) & (wide > 0)
    ratio = np.where(both, wide / np.where(both, width, 1.0), 1.0)
    middle = np.median(x, axis=0)
    away = np.maximum(known[0] - middle, middle - known[1])
    apart = away > np.maximum(width, np.abs(known).max(0) * 1e-3)
    if len(x) >= _FEW:
        apart |= (ratio > _WIDER) | (ratio < 1 / _WIDER)
    outside = ((x < known[0] - width / _CELLS) | (x > known[1] + width / _CELLS)).mean()
    usual = float(np.median(ratio[both])) if both.any() else 1.0
    other = len(x) >= _MANY and not 1 / _ALL_WIDER < usual < _ALL_WIDER
    if len(x) >= _MANY and abs(float((x < 0).mean()) - trained["negative"]) > _SIGNS:
        other = True  # e.g. 0..1 in place of values around 0
    if other or (len(x) >= _FEW and outside > _OUTSIDE) or 2 * apart.sum() > x.shape[1] > 1:
        return (
            f"{table.source}: the usual values are from {low_now:.3g} to {high_now:.3g}, and in the training rows from "
            f"{low:.3g} to {high:.3g}, or many columns have other ranges: are these rows in other units, scaled in "
            "another way, or are their columns in another order?"
        )
    if not apart.any():
        return None
    j = int(np.argmax(np.where(apart, away / np.where(width > 0, width, 1.0), -np.inf)))
    name = f' ("{table.names[j]}")' if table.names else ""
    more = f", and likewise in other columns ({apart.sum() - 1})" if apart.sum() > 1 else ""
    return (
        f"{table.source}: column x[:, {j}]{name} is usually from {now[0, j]:.3g} to {now[1, j]:.3g}, and in the "
        f"training rows from {known[0, j]:.3g} to {known[1, j]:.3g}{more}: is it in other units, or is it another "
        "column?"
    )


# --- images -----------------------------------------------------------------------------------------------------------


def _of_images(images: np.ndarray) -> dict[str, Any]:
    """The share of grey images, their usual brightness and side, and their size if all have exactly the same."""
    _, _, mean, grey, width, height = images.T
    sizes = np.unique(images[:, 4:], axis=0)
    return {
        "grey": round(float(grey.mean()), 1),
        "shade": round(float(np.median(mean)) / 255, 1),
        "side": float(2.0 ** np.round(np.log2(max(float(np.median(np.sqrt(width * height))), 1.0)))),
        "size": [int(v) for v in sizes[0]] if len(sizes) == 1 else None,
    }


def _other_images(trained: Profile, now: Profile, count: int, source: str, clients: bool) -> list[str | None]:
    found: list[str | None] = []
    if {trained["grey"], now["grey"]} == {0.0, 1.0}:
        form = ("grey", "in colours") if now["grey"] else ("in colours", "grey")
        found.append(f"the images of {source} are {form[0]}, and those of the training rows are {form[1]}")
    apart = abs(trained["shade"] - now["shade"]) > _SHADE
    if clients and apart:  # only an inversion counts: one client's drawings may be brighter than another's photographs
        apart = abs(trained["shade"] + now["shade"] - 1) <= _MIRROR
    if count >= _FEW and apart:
        how = "brighter" if now["shade"] > trained["shade"] else "darker"
        found.append(
            f"the images of {source} are much {how} than those of the training rows (usual brightness {now['shade']:g} "
            f"and {trained['shade']:g}, from 0 to 1): are they inverted, or scaled in another way?"
        )
    size, before = now["size"], trained["size"]
    if size and before and size != before and size == before[::-1]:
        found.append(
            f"the images of {source} are {size[0]} x {size[1]}, and those of the training rows {before[0]} x "
            f"{before[1]}: are rows and columns exchanged?"
        )
    ratio = now["side"] / trained["side"]
    if count >= _FEW and not 1 / _LARGER < ratio < _LARGER:
        found.append(
            f"the images of {source} have sides of about {now['side']:g} pixels, and those of the training rows of "
            f"about {trained['side']:g}: a model may see other details"
        )
    return found
