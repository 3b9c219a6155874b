"""Read Hugging Face data sets, by an id on the Hub ("cifar10", "glue:mrpc" with a configuration) or from a folder.

The folder is one that save_to_disk wrote. Official splits are kept, and "validation" is called val. If a set has
only train and validation, its validation rows are the test rows. A split with withheld labels (all -1) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.core import tasks
from fedfm.core.text import listing
from fedfm.data.arrow_texts import ArrowTexts
from fedfm.data.pictures import Pictured
from fedfm.data.sources._files import column, existing
from fedfm.data.sources._sheet import Sheet, without_nulls
from fedfm.data.sources._splits import SPLIT_NAMES, joined_splits, other_marks, with_test
from fedfm.data.sources._tabular import refuse_absent, to_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError

LISTED = 100_000  # if there are at least this many texts, they stay in the data set's Arrow files


def read(hub: str, spec: DataSpec, *, task: str | None = None) -> Table:
    """Read the table of a Hugging Face data set, with images or text.

    Raises:
        InputError: the set cannot be loaded, a column is missing, or as in ``to_table``.
    """
    import datasets

    loaded = _load(hub)
    notices: list[str] = []
    single = isinstance(loaded, datasets.Dataset)
    parts = {"train": loaded} if single else dict(loaded)
    if not parts:
        raise InputError(f'data.hub: "{hub}" has no splits')
    named = {name: SPLIT_NAMES.get(name.lower()) for name in parts}
    for name, split in named.items():
        why = "is not a train, validation or test split" if split is None else ""
        if not why and _has_withheld_labels(parts[name], spec.label):
            why = "has no labels (-1)"
        if why:
            notices.append(f'split "{name}" of {hub} {why} and was left out')
            named[name] = None
    kept = {name: split for name, split in named.items() if split is not None}
    if "train" not in kept.values():
        raise InputError(f'data.hub: "{hub}" has the splits {listing(parts)}; a "train" split is expected')
    marks, more = with_test(list(kept.values()), hub)
    kept = dict(zip(kept, marks, strict=True))
    notices += (*more, *joined_splits(kept, hub))
    features = next(iter(parts.values())).features
    picture = _picture_column(features, spec, notices)
    columns: dict[str, Sequence[Any]] = {}
    lazy = None if picture else _text_column([parts[name] for name in kept], spec, task)
    encoded: list[Any] = []
    for name in kept:
        part = parts[name]
        if picture:
            part = part.cast_column(picture, datasets.Image(decode=False))
        for key, kind in part.features.items():  # tasks themselves decode recordings and lists of images
            if isinstance(kind, datasets.Audio):
                part = part.cast_column(key, datasets.Audio(decode=False))
            elif isinstance(getattr(kind, "feature", None), datasets.Image):
                part = part.cast_column(key, replace(kind, feature=datasets.Image(decode=False)))
        for key in features:
            if key not in part.features:
                raise InputError(f'data.hub: split "{name}" of {hub} has no column "{key}", which another split has')
            if key not in (picture, lazy):
                plain = isinstance(features[key], datasets.Value)
                values = part[key][:]
                columns[key] = [*columns.get(key, ()), *(values if plain else map(without_nulls, values))]
        if picture:
            encoded.append(part.select_columns([picture]))
    if lazy is not None:
        import pyarrow

        chunks = [chunk for name in kept for chunk in parts[name].data.column(lazy).chunks]
        columns[lazy] = ArrowTexts(pyarrow.chunked_array(chunks, pyarrow.string()))
    official = np.array([split for name, split in kept.items() for _ in range(len(parts[name]))])
    places = [(name, row) for name in kept for row in range(len(parts[name]))]
    if not places:
        raise InputError(f'data.hub: "{hub}" has no rows')

    def at(row: int) -> str:
        return f"{hub}, {places[row][0]}[{places[row][1]}]"

    named_by = {name: _class_names(parts[name].features.get(spec.label)) for name in kept}
    names, (first, *rest) = next(iter(named_by.values())), named_by
    if other := next((name for name in rest if named_by[name] != names), None):
        raise InputError(
            f'data.hub: the splits "{first}" and "{other}" of {hub} name the classes of "{spec.label}" differently, so '
            "that their numbers mean different classes: give all splits the same class names"
        )
    if len(kept) > 1 or (not single and spec.split not in columns):
        refuse_absent(features, spec, "split", hub)
        notices += other_marks(columns.pop(spec.split, None), official.tolist(), spec.split, hub)
        columns[spec.split] = official.tolist()
    if picture:
        columns[picture] = Encoded(encoded, picture)
        spec = replace(spec, image=picture)
    sheet = Sheet(columns, at, tuple(notices), {} if names is None else {spec.label: names})
    return to_table(sheet, spec, source=hub, task=task)


def _load(hub: str) -> Any:
    import datasets

    folder = Path(hub).expanduser()
    try:
        here = folder.is_dir()
    except OSError:  # the name is too long for a folder
        here = False
    try:
        if here:
            return datasets.load_from_disk(str(folder))
        if hub.startswith(("/", ".", "~")) or "\\" in hub or not hub.strip():
            existing(folder, "data.hub")
        name, _, configuration = hub.partition(":")
        return datasets.load_dataset(name, configuration or None)
    except InputError:
        raise
    except Exception as error:  # errors of the library, the network and the file system
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        right = "a folder written by save_to_disk" if here else 'a data set id, "id:configuration", or a folder'
        raise InputError(f'data.hub: "{hub}" cannot be loaded ({why}); expected {right}') from None


def _class_names(kind: Any) -> tuple[str, ...] | None:
    """The class names of a column, or of the lists in a column, in order; None if the column has no class names."""
    import datasets

    kind = getattr(kind, "feature", kind)
    return tuple(kind.names) if isinstance(kind, datasets.ClassLabel) else None


def _has_withheld_labels(part: Any, label: str) -> bool:
    """Whether all labels are -1, the mark of withheld labels in data sets of the Hub."""
    return label in part.features and len(part) > 0 and all(value == -1 for value in part[label][:])


def _picture_column(features: Any, spec: DataSpec, notices: list[str]) -> str | None:
    """The column of images: ``data.image``, or the only image column if there are no texts; else None."""
    import datasets

    found = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    if spec.image in found:
        return spec.image
    if len(found) == 1 and spec.text not in features:
        notices.append(f'images are read from column "{found[0]}", the only one that holds images')
        return str(found[0])
    if found and spec.text not in features:
        column(dict.fromkeys(found, ()), spec.image, "data.image", "images")
    return None


def _text_column(parts: Sequence[Any], spec: DataSpec, task: str | None) -> str | None:
    """The column of texts if they are too many for memory and stay in Arrow files; else None."""
    if ((named := tasks.task_named(task)) is not None and named.answers) or sum(map(len, parts)) < LISTED:
        return None
    plain = all(
        spec.text in part.features and str(part.data.schema.field(spec.text).type) == "string" and part._indices is None
        for part in parts
    )
    return spec.text if plain else None


class Encoded(Sequence[str | bytes], Pictured):
    """The images of several data sets, in the order of the sets, as paths or encoded; an image is read on access.

    Args:
        parts: data sets whose column of images is not decoded.
        column: name of this column.
    """

    decoded = True

    def __init__(self, parts: Sequence[Any], column: str) -> None:
        self._parts, self._column = parts, column
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        part = int(np.searchsorted(self._ends, i, side="right"))
        if not 0 <= i < len(self):
            raise IndexError(i)
        item = self._parts[part][int(i) - (int(self._ends[part - 1]) if part else 0)][self._column]
        return item and (item.get("bytes") or item.get("path"))
