"""Read the labels of rows with several labels: lists of names, names in one text, or a 0 or 1 for each label."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedfm.core.row_targets import FigureTable, RowTargets
from fedfm.core.text import listing
from fedfm.data.class_names import class_name, names_of, notices_of
from fedfm.data.sources._files import column
from fedfm.data.sources._sheet import Sheet
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError

Names = tuple[str, ...]
_NAMED = 3  # largest number of labels that a notice names
_MARKS = re.compile(r"[01](?:[ ,_/|-]?[01])+")  # a 0 or 1 for each of several labels, in one text
_CODE = re.compile(r"\[.*\]|\{.*\}|\((?=[^,'\"]*[,'\"]).*\)", re.DOTALL)  # as Python writes lists and the like


def read(sheet: Sheet, spec: DataSpec, source: str) -> RowTargets:
    """The labels of each row as 0 or 1 (N, C), with the names of all labels.

    Raises:
        InputError: a cell is neither a list of names nor a text, a cell names a label twice, or no row has a label.
    """
    name, separator = spec.label, spec.column("label_separator")
    if not separator:
        raise InputError('data.label_separator = "": expected the text between two labels', key="data.label_separator")
    cells = [_plain(value) for value in column(sheet.columns, name, "data.label", source)]
    known = names_of(sheet.names[name], source) if name in sheet.names else None
    if (marks := _marks(cells, known)) is not None:
        classes = known or tuple(map(str, range(marks.shape[1])))
        note = (
            f'column "{name}" of {source} is read as a 0 or 1 for each of {len(classes)} labels: {listing(classes, 5)}'
        )
        return RowTargets(marks, classes, frozenset({name}), (note, *_without(marks)))
    rows = [_names(value, name, separator, sheet.at(i), known) for i, value in enumerate(cells)]
    classes = known or _in_order({label for row in rows for label in row})
    if not classes:
        raise InputError(f'{source}: no row has a label in column "{name}": there is nothing to learn')
    place = {label: i for i, label in enumerate(classes)}
    values = np.zeros((len(rows), len(classes)))
    for i, row in enumerate(rows):
        values[i, [place[label] for label in row]] = 1
    parts = ((entry, isinstance(v, str)) for v in cells for entry in _entries(v, separator) if isinstance(entry, str))
    written = (entry.strip() if split else entry for entry, split in parts)  # "a; b" has a blank for its readers
    notices = (*notices_of(written, name), *_like_marks(classes, name), *_without(values))
    return RowTargets(values, classes, frozenset({name}), notices)


def _plain(value: Any) -> Any:
    """Convert a tuple, an array, or the JSON text of a list to a list; other values do not change."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _marks(cells: Sequence[Any], known: Names | None) -> np.ndarray | None:
    """The cells as an array (N, C) if each is a list of C numbers 0 or 1; None for lists of names or indexes."""
    if not all(isinstance(cell, list) and len(cell) == len(cells[0]) > 0 for cell in cells):
        return None
    if not all(isinstance(v, int | float) and v in (0, 1) for cell in cells for v in cell):
        return None
    if known is None and all(len(set(cell)) == len(cell) for cell in cells):
        return None  # each cell may be a list of labels with the names 0 and 1
    if known is not None and len(known) != len(cells[0]):
        return None
    return np.array(cells, dtype=np.float64)


def _entries(value: Any, separator: str) -> list[Any]:
    if isinstance(value, str):
        return value.split(separator) if value.strip() else []
    return value if isinstance(value, list) else []


def _names(value: Any, name: str, separator: str, where: str, known: Names | None) -> Names:
    """The names of a row's labels."""
    likes = f'a list of names, or one text with "{separator}" between names (data.label_separator)'
    if value is None or value != value:
        raise InputError(f'{where}: column "{name}" has no value: expected {likes}; a row without labels has []')
    if not isinstance(value, str | list):
        raise InputError(f'{where}: column "{name}" holds {value!r:.40}: expected {likes}')
    if isinstance(value, str) and _CODE.fullmatch(value.strip()):
        raise InputError(f'{where}: column "{name}" holds {value!r:.40}, a list that is not JSON: expected {likes}')
    found = tuple(_name(entry, i, name, where, known) for i, entry in enumerate(_entries(value, separator)))
    if len(set(found)) < len(found):
        twice = next(label for label, count in Counter(found).items() if count > 1)
        raise InputError(
            f'{where}: column "{name}" has the label "{twice}" twice: expected each of a row\'s labels once'
        )
    return found


def _name(entry: Any, i: int, name: str, where: str, known: Names | None) -> str:
    if isinstance(entry, str) and (found := class_name(entry)):
        if known is not None and found not in known:
            raise InputError(f'{where}: label "{found}" in "{name}" is none of the labels of the file')
        return found
    if isinstance(entry, int) and not isinstance(entry, bool):
        if known is None:
            return str(entry)
        if not 0 <= entry < len(known):
            raise InputError(
                f'{where}: label {entry} in "{name}" is outside of 0..{len(known) - 1}, the labels of the file'
            )
        return known[entry]
    what = "empty" if isinstance(entry, str) else f"{entry!r:.40}"
    raise InputError(f'{where}: entry {i} of "{name}" is {what}: labels are names that are not empty')


def _in_order(names: set[str]) -> Names:
    numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=int) if numbers else sorted(names))


def _like_marks(classes: Names, name: str) -> tuple[str, ...]:
    """A notice if all names look like a 0 or 1 for each of several labels, such as "101"; () if they do not."""
    alike = len({len(label) for label in classes}) == 1 < len(classes)
    if not alike or not all(map(_MARKS.fullmatch, classes)):
        return ()
    return (
        f'column "{name}" holds texts such as "{classes[-1]}", and each is read as the name of a label: if they are a '
        "0 or 1 for each label, write them as lists, such as [1, 0, 1]",
    )


def _without(values: np.ndarray) -> tuple[str, ...]:
    """A notice about rows without a label; () if there are none."""
    count = int((values.sum(1) == 0).sum())
    if not count:
        return ()
    rows = "1 row has" if count == 1 else f"{count} of {len(values)} rows have"
    return (f"{rows} no label: the model learns that no label fits there",)


def forewarnings(parts: Mapping[str, Table]) -> list[str]:
    """Notices about labels that no training row has or every one has; else a notice if each row has just one label."""
    training = parts.get("training")
    if training is None or training.targets is None or not len(training):
        return []
    counts, found = np.nansum(training.targets, 0), list[str]()
    for of, words in (
        (counts == 0, "no training row: no client can learn it"),
        (counts == len(training), "every training row: there is nothing to distinguish"),
    ):
        names = [name for name, is_so in zip(training.classes, of, strict=True) if is_so]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            listed = ", ".join(f'"{label}"' for label in names[:_NAMED])
            found.append(f"{'label' if len(names) == 1 else 'labels'} {listed}{more}: in {words}")
    if (
        not found
        and len(training) > 1
        and training.targets.shape[1] > 1
        and (np.nansum(training.targets, 1) == 1).all()
    ):
        found.append('each training row has exactly one label: task "classification" is made for such rows')
    return found


def about_outputs(threshold: Any) -> str:
    """How a reader of an export gets labels from the model's outputs."""
    if not isinstance(threshold, Mapping):
        return f"A row has each label whose probability, the sigmoid of its output, is at least {threshold:g}."
    least = ", ".join(f"{name} {p:.6g}" for name, p in threshold.items())
    return f"A row has each label whose probability, the sigmoid of its output, is at least its threshold: {least}."


def tables(figures: Mapping[str, Any], classes: Sequence[str], by_label: Sequence[str]) -> list[FigureTable]:
    """A report's table with the scores of each label; none if no such scores are known."""
    columns = {name: figures.get(name) for name in by_label}
    known = {name: of for name, of in columns.items() if isinstance(of, Mapping)}
    if isinstance(of := figures.get("threshold"), Mapping):
        known["threshold"] = of
    if not known:
        return []
    head = ("label", *(name.removesuffix("_by_label").replace("_", " ") for name in known))
    rows = tuple((name, *(_cell(key, of.get(name)) for key, of in known.items())) for name in classes)
    note = "On the global test rows. Rows: those with the label. A dash: no row has the label, or all have it."
    return [FigureTable("Scores of each label", head, rows, note)]


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if key.startswith("rows") else f"{value:.4f}"
