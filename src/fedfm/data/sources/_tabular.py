"""Make tables from the named columns of files and of data sets from the Hugging Face Hub.

Labels are class names or integers. The classes are the sorted distinct values, so the integers 1..5 and 0..4 both
give five classes. A column ``label_name`` gives the classes their names. Names are sorted by code point.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedfm.core import tasks
from fedfm.core.text import listing
from fedfm.data import picture_forms
from fedfm.data.arrow_texts import ArrowTexts
from fedfm.data.class_names import class_name, names_of, notices_of
from fedfm.data.invisible import is_blank
from fedfm.data.pictures import Look, Pictured, arrange
from fedfm.data.sources import _layouts
from fedfm.data.sources._files import At, column, str_array
from fedfm.data.sources._other_tasks import files_in_cells, other_task, refuse_other
from fedfm.data.sources._sheet import Sheet
from fedfm.data.sources._unread import notice_of_unread, notices_of_marks
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table, words_of
from fedfm.data.task_rows import RowTask, row_task
from fedfm.errors import InputError, NoColumn

SPLITS = ("train", "val", "test")
_TARGETS = ("output", "chosen", "rejected", "tags")  # keys of columns that rows to predict do not need
_ALIASES = {"training": "train", "validation": "val", "valid": "val", "dev": "val", "testing": "test", "eval": "test"}
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_WHOLE = re.compile(r"(-?[0-9]+)(?:[.]0+|,(?!000$)0+)")  # an integer with a zero fraction; but 1,000 is 1000
_EXACT = 1 << 53  # the first floating-point number to which other integers are rounded

Columns = Mapping[str, Sequence[Any]]
Labels = tuple[np.ndarray | None, tuple[str, ...], tuple[str, ...]]  # (N,) int64, class names, notices
UNLABELLED: Labels = None, (), ()


def to_table(sheet: Sheet, spec: DataSpec, *, source: str, task: str | None = None, labelled: bool = True) -> Table:
    """Make a table from a sheet's columns.

    Args:
        spec: names of the columns.
        source: name of the file in messages.
        task: determines which columns are read, and how; if None, the columns determine the task.
        labelled: False for rows to predict. Then label and split are ignored, each row is a test row, and an output may
            be missing (""). Only the prompts of preferences are read, as instructions.

    Raises:
        InputError: a column is missing, a cell is empty or of another type, or the rows belong to another task.
    """
    columns, at, length = sheet.columns, sheet.at, len(sheet)
    if length == 0:
        raise InputError(f"{source} has no rows below its column names")
    for key in ("text", "image", "label_name", "split") if labelled else ():
        refuse_absent(columns, spec, key, source)
    spec, guessed = _layouts.resolve(columns, spec, task)
    kind: str
    inputs: Any
    used, notices = {spec.split}, (*sheet.notices, *guessed)
    label: Labels = UNLABELLED
    targets: np.ndarray | None = None
    looks: list[Look] = []
    reader = _reader(columns, spec, task)
    try:
        reading = None if reader is None else reader.read(sheet, spec, source=source, labelled=labelled)
    except NoColumn as error:
        raise (_explain(error, columns, spec, reader) if labelled else error) from None
    if reading is not None:
        kind, inputs = reading.kind, reading.inputs
        label = None, reading.classes, ()
        notices += reading.notices
        used |= reading.used
    elif (picture := _picture_column(columns, spec)) is not None:
        kind = "image"
        if picture != spec.image:
            notices += (f'images are read from column "{picture}", the only one that holds images',)
        inputs, more, looks = arrange(columns[picture], at, source)
        notices += more
        used |= {picture}
    else:
        own = None if reader is None or not reader.packs("text") else reader.own_kind
        kind = "text" if own is None else own.name
        if spec.text not in columns and labelled:
            missing = NoColumn(f'{source}: no column "{spec.text}" (data.text)', "")
            if (better := _explain(missing, columns, spec, reader)) is not missing:
                raise better
        refuse_other(columns, spec.label, source, spec.text, labelled)
        inputs = _texts(columns, spec.text, "data.text", source, at)
        used |= {spec.text}
    of_task = () if reader is None else tuple(of.key for of in reader.columns if not of.several)
    keys = (key for key in ("text", "image", *of_task) if key not in _TARGETS)
    read = tuple(key for key in keys if spec.column(key) in used & columns.keys())
    if kind in ("text", "image") and labelled:
        classes = {name: v for name, v in columns.items() if name != spec.label or not isinstance(v, Pictured)}
        has_targets = reader is not None and reader.own_targets
        if (
            kind == "image"
            and not has_targets
            and spec.label not in classes
            and (way := other_task(columns, spec.label))
        ):
            raise InputError(f'{source}: no column "{spec.label}" of classes; {way}')
        if reader is not None and has_targets:
            of = reader.read_targets(replace(sheet, columns=classes), spec, source=source)
            targets, label = of.values, (None, of.classes, of.notices)
            used |= of.used
        else:
            label = labels_of(columns, spec, source=source, at=at, classes=sheet.names.get(spec.label))
        notices += label[2]
        if kind == "image":
            notices += picture_forms.notices(looks, label[0], label[1], source)
        used |= {spec.label, spec.label_name} if targets is None else set()
    ignored = used | {spec.label, spec.label_name}
    notices += notices_of_marks(columns, spec, source) if labelled else ()
    return Table(
        kind=kind,
        inputs=inputs,
        labels=label[0],
        classes=label[1],
        split=split_of(columns, spec, length, at) if labelled else np.full(length, "test"),
        columns=others(columns, used),
        source=source,
        read=read,
        notices=(*notices, *notice_of_unread(columns, ignored, spec, source, labelled=kind in ("text", "image"))),
        targets=targets,
    )


def refuse_absent(columns: Mapping[str, Any], spec: DataSpec, key: str, source: str) -> None:
    """Refuse a key of the [data] table that names a column which is not there; its default need not be there.

    Raises:
        NoColumn: the column is missing; other rows would be read, or other test rows drawn.
    """
    if vars(spec)[key] != getattr(DataSpec, key):
        column(columns, vars(spec)[key], f"data.{key}", source)


def _reader(columns: Columns, spec: DataSpec, task: str | None) -> RowTask | None:
    """The named task, else the first task that claims these columns; None if texts or images leave the task open."""
    if task is not None or spec.text in columns:
        named = tasks.task_named(task)
        return None if named is None else row_task(named)
    return next((of for of in map(row_task, tasks.available()) if of.claims(columns, spec)), None)


def _explain(error: NoColumn, columns: Columns, spec: DataSpec, reader: RowTask | None) -> InputError:
    """The error that a column is missing, with the task to which these columns belong; the same error if none is."""
    other = _reader(columns, _layouts.resolve(columns, replace(spec, text=""), None)[0], None)
    if other is not None and (reader is None or other.name != reader.name):
        words = words_of(other.table_kinds[0])
        return InputError(f'{error.missing}; it has {words}: set model.task = "{other.name}"')
    facts = tasks.default() if reader is None else reader
    recordings = any(of.key == "audio" for of in facts.columns)
    found = files_in_cells(columns, spec.label, images="image" in facts.table_kinds, recordings=recordings)
    return error if found is None else InputError(f"{error.missing}; {found}")


def _picture_column(columns: Columns, spec: DataSpec) -> str | None:
    """The column of images: ``data.image``, or the only image column if there are no texts."""
    found = [name for name, values in columns.items() if isinstance(values, Pictured)]
    if not found or (spec.text in columns and spec.image not in found):
        return None
    if spec.image in found:
        return spec.image
    if len(found) > 1:
        column(dict.fromkeys(found, ()), spec.image, "data.image", "images")
    return found[0]


def labels_of(
    columns: Columns, spec: DataSpec, *, source: str, at: At, classes: tuple[str, ...] | None = None
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """Return (labels (N,) int64, class names (from the column ``label_name`` if it exists), notices)."""
    values = column(columns, spec.label, "data.label", source)
    if classes is not None:
        names = names_of(classes, source)
        return codes_within(values, names, spec.label, at), names, notices_of(classes, spec.label)
    labels, keys, notices = codes_of(values, spec.label, at)
    if spec.label_name not in columns or spec.label_name == spec.label:
        return labels, keys, notices
    written = _texts(columns, spec.label_name, "data.label_name", source, at)
    first: dict[int, int] = {}
    owner: dict[str, int] = {}
    for row, (label, name) in enumerate(zip(labels.tolist(), written, strict=True)):
        known = first.setdefault(label, row)
        if class_name(written[known]) != class_name(name):
            raise InputError(
                f'{at(row)}: label "{keys[label]}" is named "{name}" here and "{written[known]}" in {at(known)}: '
                "every label must have one name"
            )
        of = owner.setdefault(class_name(name), label)
        if of != label:
            raise InputError(
                f'{at(row)}: "{name}" names label "{keys[label]}" here and label "{keys[of]}" '
                f"in {at(first[of])}: every name must belong to one label"
            )
    found = tuple(class_name(written[first[label]]) for label in range(len(keys)))
    return labels, found, notices_of(written, spec.label_name)


def codes_of(values: Sequence[Any], name: str, at: At) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """Return (labels (N,) int64, class names, notices) for the values of a label column."""
    cleaned, written = _whole_numbers([_label(value, name, at, row) for row, value in enumerate(values)], name)
    distinct = set(cleaned)
    integers = all(isinstance(v, int) or _INTEGER.fullmatch(v) for v in distinct)
    keys = sorted({int(v) for v in distinct}) if integers else sorted({str(v) for v in distinct})
    code = {str(key): index for index, key in enumerate(keys)}
    notices = (*notices_of((v for v in values if isinstance(v, str)), name), *written)
    if integers and keys != list(range(len(keys))):
        shown = listing([str(k) for k in keys], 5)
        notices += (f'the integers in column "{name}" are not 0..{len(keys) - 1}: they become the class names {shown}',)
    return np.array([code[str(v)] for v in cleaned], dtype=np.int64), tuple(map(str, keys)), notices


def _whole_numbers(labels: list[int | str], name: str) -> tuple[list[int | str], tuple[str, ...]]:
    """The labels as integers, with a notice, if all are integers and some have a zero fraction, such as "1,0"."""
    texts = {v for v in labels if isinstance(v, str) and not _INTEGER.fullmatch(v)}
    whole: dict[int | str, int] = {v: int(found[1]) for v in texts if (found := _WHOLE.fullmatch(v))}
    if not texts or len(whole) < len(texts):
        return labels, ()
    first = min(texts)
    note = f'the labels in column "{name}" are read as integers: "{first}" as {whole[first]}'
    return [whole.get(v, v) for v in labels], (note,)


def codes_within(values: Sequence[Any], classes: tuple[str, ...], name: str, at: At) -> np.ndarray:
    """Labels (N,) int64, from values that are class names or indexes into ``classes``."""
    code: dict[Any, int] = {known: index for index, known in enumerate(classes)}
    labels = np.empty(len(values), dtype=np.int64)
    for row, value in enumerate(values):
        label = _label(value, name, at, row)
        index = label if isinstance(label, int) else code.get(label, -1)
        if not 0 <= index < len(classes):
            raise InputError(
                f'{at(row)}: label "{label}" is outside the {len(classes)} classes {listing(classes, 5)}'
                + (f" (0..{len(classes) - 1})" if isinstance(label, int) else "")
            )
        labels[row] = index
    return labels


def split_of(columns: Columns, spec: DataSpec, length: int, at: At) -> np.ndarray:
    """The split of each row, from the split column; "train" for all rows if there is no such column."""
    if spec.split not in columns:
        return np.full(length, "train")
    values = [str(v) if v is not None else "" for v in columns[spec.split]]
    check_split(values, spec.split, at)
    return np.array(values)


def check_split(values: Sequence[str], name: str, at: At) -> None:
    """Raise an InputError if a value is not train, val or test."""
    for value in sorted(set(values) - set(SPLITS)):
        like = _ALIASES.get(value.strip().lower(), value.strip().lower())
        hint = f'; did you mean "{like}"?' if like in SPLITS else ""
        raise InputError(f'{at(values.index(value))}: {name} "{value}" is not one of train, val, test{hint}')


def others(columns: Columns, used: set[str]) -> dict[str, np.ndarray]:
    """The columns that are not in ``used``, as strings; a missing value is ""."""
    return {
        name: str_array([_cell(v) for v in values])
        for name, values in columns.items()
        if name and name not in used and not isinstance(values, Pictured)
    }


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
    return "" if value is None else str(value)


def _texts(columns: Columns, name: str, key: str, source: str, at: At) -> Sequence[str]:
    """A column of non-empty strings; texts in a memory-mapped file stay there."""
    values = column(columns, name, key, source)
    for row, value in enumerate(values):
        if value is None or is_blank(_text(value, name, at, row)):
            raise InputError(f'{at(row)}: column "{name}" is empty: fill it, or remove the row')
    return values if isinstance(values, ArrowTexts) else list(values)


def _text(value: Any, name: str, at: At, row: int) -> str:
    if not isinstance(value, str):
        raise InputError(f'{at(row)}: column "{name}" holds {type(value).__name__} {value!r:.40}: text is expected')
    return value


def _label(value: Any, name: str, at: At, row: int) -> int | str:
    """A label value as an integer, or as a class name in its normal form."""
    if isinstance(value, str):
        value = class_name(value)
        if value:
            return str(value)
    elif isinstance(value, bool | np.bool_):
        return str(bool(value))
    elif isinstance(value, int | np.integer) or (isinstance(value, float) and value.is_integer()):
        if isinstance(value, float) and abs(value) >= _EXACT:
            raise InputError(
                f'{at(row)}: column "{name}" holds the floating-point number {value!r}: from 2^53 on these are '
                "rounded, so two labels may be one number here: write the labels as integers or texts"
            )
        return int(value)  # pandas writes integers as floats if a value is missing
    elif value is not None and not (isinstance(value, float) and math.isnan(value)):
        what = f"{type(value).__name__} {value!r:.40}"
        for_numbers = 'for numbers, set model.task = "regression"'
        way = 'for several labels per row, set model.task = "multi_label"' if isinstance(value, list) else for_numbers
        raise InputError(f'{at(row)}: column "{name}" holds {what}: labels are class names or integers; {way}')
    raise InputError(f'{at(row)}: column "{name}" is empty: give a label, or remove the row')
