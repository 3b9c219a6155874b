"""Coarse properties of the rows that a run has read, and a comparison of later rows with them.

A model applies only to rows like those of its training. Rows in other units, with columns in another order, or in
another language give probabilities that look normal. So a run records such properties, and predictions compare.
Quantities are rounded to an eighth of their range, and shares to tenths, so that no property tells a single row.
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

_LOOKED_AT = 2000  # rows of feature vectors
_COLUMNS = 4096  # most columns whose ranges are recorded one by one
_TAIL = 0.02  # share of the values outside of a range, at each end
_CELLS = 8  # steps of the grid to which a range is rounded
_FEW, _MANY = 8, 20  # rows from which shares, and from which ranges are compared
_OUTSIDE = 0.35  # share of values outside the training range from which a notice is given
_ALL_WIDER, _WIDER = 8.0, 50.0  # ratio of the widths of ranges: median of all columns, and one column
_COMPARED = 20  # most clients that are compared
_SIGNS = 0.4  # difference of the shares of negative values
_SHADE = 0.35  # difference of brightness, of 0..1
_FURTHER = ("input", "system", "tools")  # keys of columns that add to what is asked
_MIRROR = 0.15  # how far brightness is from the mirror image of another
_LARGER = 4.0  # ratio of the sides of images


def profile_of(table: Table, images: np.ndarray | None = None) -> dict[str, Any]:
    """The properties of a table's rows, as JSON.

    Args:
        images: of images what :func:`fedfm.data.thumbnails.figures` returns.
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


def compare(
    trained: Profile, table: Table, images: np.ndarray | None = None, of: str = "the training rows"
) -> list[str]:
    """Notices about rows that differ from those of which a run has recorded the properties.

    Args:
        trained: what :func:`profile_of` returned of the run's rows.
        images: as of :func:`profile_of`.
        of: whose properties ``trained`` are, in messages.

    Raises:
        InputError: the columns have other names, or the same names in another order.
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
    """Compare the names of columns of feature vectors, if both are known.

    Raises:
        InputError: they differ, or are in another order.
    """
    if not wanted or not given or list(wanted) == list(given):
        return
    j = next((j for j, (a, b) in enumerate(zip(wanted, given, strict=False)) if a != b), min(len(wanted), len(given)))
    if set(wanted) == set(given):
        raise InputError(
            f'{source}: column x[:, {j}] is "{given[j]}", and in {of} it is "{wanted[j]}": the columns are in another '
            "order; put them in the same"
        )
    missing = [name for name in wanted if name not in given]
    strange = [name for name in given if name not in wanted]
    raise InputError(
        f"{source}: the columns of x are not those of {of}: missing {listing(missing, 4) or 'none'}, "
        f"unknown {listing(strange, 4) or 'none'}"
    )


def between_clients(table: Table) -> list[str]:
    """Notices about clients whose feature vectors or images differ from those of the client with most rows."""
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
    """The class of which both clients have most rows, since clients differ in their shares of classes; None if few."""
    if table.labels is None:
        return None
    counts = [
        np.bincount(table.labels[table.columns[CLIENT] == name], minlength=len(table.classes)) for name in (one, other)
    ]
    both = np.minimum(*counts)
    return int(both.argmax()) if both.max() >= _FEW else None


def unknown_classes(table: Table, label: str, classes: Sequence[str]) -> str | None:
    """A notice about labels of rows to predict that are none of the model's classes.

    Args:
        label: name of the column of labels, which is not read otherwise.
        classes: the model's.
    """
    given = Counter(class_name(value) for value in table.columns.get(label, ()) if value.strip())
    numbers = all(name.removesuffix(".0").isdigit() and float(name) < len(classes) for name in given)
    if numbers and not all(name.isdigit() for name in classes):  # numbers of the classes
        return None
    known = {name.casefold() for name in classes}
    strange = {name: n for name, n in given.items() if not {name.casefold(), name.removesuffix(".0")} & known}
    if not strange or not classes:
        return None
    return (
        f'{sum(strange.values())} of {len(table)} rows of {table.source} have a label (column "{label}") that is no '
        f"class of the model, as {listing(sorted(strange), 4)}: each of these rows gets one of its classes all the same"
    )


def _has_words(table: Table) -> bool:
    of = tasks.row_kind(table.kind)
    return table.kind == "text" or (of is not None and of.wording)


def _fewer_columns(trained: Profile, table: Table) -> str | None:
    """A notice about further columns of which the run's inputs were made, and which these rows lack."""
    if "messages" in table.read:  # conversations have such parts inside
        return None
    missing = [f"data.{key}" for key in trained.get("read", ()) if key in _FURTHER and key not in table.read]
    if not missing:
        return None
    return (
        f"{table.source} has no column {' and '.join(missing)}, and the training rows have it: the model gets less "
        "than it was trained with"
    )


# --- feature vectors --------------------------------------------------------------------------------------------------


def _some(table: Table) -> np.ndarray:
    """Up to 2000 rows (n, d), evenly over all."""
    places = np.unique(np.linspace(0, len(table) - 1, _LOOKED_AT).astype(np.int64))
    return np.asarray(table.inputs[places], dtype=np.float64)


def _range(x: np.ndarray) -> np.ndarray:
    """The range of each column (2, d), without the ends."""
    found: np.ndarray = np.quantile(x, [_TAIL, 1 - _TAIL], axis=0, method="nearest")
    return found


def _grid(ends: np.ndarray) -> list[list[float]]:
    """Ranges that were widened to a grid of at most an eighth of their width, as [low, high] of each column."""
    low, high = ends
    size = np.where(high > low, high - low, np.maximum(np.abs(high), 1e-6))
    step = 2.0 ** np.floor(np.log2(size / _CELLS))
    low, high = np.floor(low / step) * step, np.ceil(high / step) * step
    return [[float(a), float(b)] for a, b in zip(low, high, strict=True)]


def _other_ranges(trained: Profile, table: Table) -> str | None:
    """A notice about values of another scale, or about columns whose values lie elsewhere."""
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
            f"{low:.3g} to {high:.3g}, or their columns lie elsewhere: are these rows in other units, scaled in "
            "another way, or are their columns in another order?"
        )
    if not apart.any():
        return None
    j = int(np.argmax(np.where(apart, away / np.where(width > 0, width, 1.0), -np.inf)))
    name = f' ("{table.names[j]}")' if table.names else ""
    more = f", and {apart.sum() - 1} more columns are like it" if apart.sum() > 1 else ""
    return (
        f"{table.source}: column x[:, {j}]{name} is usually from {now[0, j]:.3g} to {now[1, j]:.3g}, and in the "
        f"training rows from {known[0, j]:.3g} to {known[1, j]:.3g}{more}: is it in other units, or is it another "
        "column?"
    )


# --- images -----------------------------------------------------------------------------------------------------------


def _of_images(images: np.ndarray) -> dict[str, Any]:
    """Share of grey images, mean brightness in tenths, and the usual width and height, if all are alike exactly."""
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
    if clients and apart:  # drawings of one client are brighter than photographs of another; inversion mirrors
        apart = abs(trained["shade"] + now["shade"] - 1) <= _MIRROR
    if count >= _FEW and apart:
        how = "brighter" if now["shade"] > trained["shade"] else "darker"
        found.append(
            f"the images of {source} are much {how} than those of the training rows (usual mean {now['shade']:g} and "
            f"{trained['shade']:g} of 1): are they inverted, or scaled in another way?"
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
