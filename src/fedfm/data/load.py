"""Load the [data] table: read the source, mark test rows, limit training rows, scale feature vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.core import tasks
from fedfm.data.partition import CLIENT
from fedfm.data.spec import DataSpec
from fedfm.data.stratify import hold_out, thin
from fedfm.data.table import Table, words_of
from fedfm.errors import InputError
from fedfm.seeds import generator


def load_table(spec: DataSpec, *, seed: int, task: str | None = None, trained_classes: int | None = None) -> Table:
    """Read the rows that a [data] table describes, and mark each as train, val or test.

    ``where`` keeps only rows whose columns have the listed values; no class is removed. If a source
    marks no test rows, ``test_fraction`` of its training rows become test rows. They are stratified by class (and by
    the column of a ``by_column`` partition, so that each client has test rows). In running text, the end becomes the
    test text. With ``clients`` each file is processed separately; classes of the same name are one class, and the
    column "client" names the client. With ``trained_classes``, training and validation rows of the other classes are
    left out. Then ``limit`` reduces the number of training rows; test rows are kept.

    Args:
        spec: the [data] table.
        seed: determines which rows become test rows, and which training rows a limit keeps.
        task: the model's task; None if the data imply it.
        trained_classes: the number of classes, from the first, that have training rows; None for all classes.

    Raises:
        InputError: the table is contradictory, or the data are invalid; the message says where.

    Example:
        >>> table = load_table(DataSpec(name="digits", limit=200), seed=0)
        >>> table.kind, len(table.rows("train")), len(table.rows("test"))
        ('image', 200, 359)
    """
    if spec.classes is not None:
        return _without_rows(spec)
    if spec.clients:
        from fedfm.data import files
        from fedfm.data.client_files import of_clients

        def read(path: Path) -> Table:
            return _fit(files.read(path, spec, task, labelled=True), task)

        def hold_out_of(name: str, table: Table) -> Table:
            return _mark_test(table, spec, generator(seed, "split", name))

        table = of_clients(spec.clients, read, hold_out_of, task)
    else:
        table = _read(spec, task)
        if spec.where:
            from fedfm.data.selection import filter_rows

            table = filter_rows(table, spec)
        table = _mark_test(_fit(table, task), spec, generator(seed, "split"))
    if trained_classes is not None:
        from fedfm.data.selection import drop_new_classes

        table = drop_new_classes(table, trained_classes)
    table = _limit(table, spec, generator(seed, "limit"))
    if spec.name is None or spec.where or trained_classes is not None:  # complete built-in data need no check
        from fedfm.data.doubts import doubts
        from fedfm.data.profiles import with_profile
        from fedfm.data.thumbnails import figures_of_images

        images = figures_of_images(table)
        table = replace(table, notices=(*table.notices, *doubts(table, spec.label, images)))
        return with_profile(_scale(table, spec), images)
    return _scale(table, spec)


def _without_rows(spec: DataSpec) -> Table:
    """The table of a server that knows only the classes."""
    inputs: Any = np.zeros((0, spec.width), np.float32) if spec.width is not None else []
    labels = np.zeros(0, np.int64) if spec.classes and tasks.owner(spec.kind or "") is None else None
    return Table(spec.kind or "", inputs, labels, spec.classes or (), np.zeros(0, "<U5"), source="data.classes")


def check_files(spec: DataSpec) -> None:
    """Raise an InputError for missing files, without reading any."""
    from fedfm.data.sources._files import existing

    if spec.path is not None:
        existing(spec.path)
    for name, path in (spec.clients or {}).items():
        existing(path, f"data.clients.{name}")


def _scale(table: Table, spec: DataSpec) -> Table:
    if spec.scale == "none":
        return table
    from fedfm.data.feature_scales import scale_features

    return scale_features(table, spec.scale)


def _read(spec: DataSpec, task: str | None) -> Table:
    """The rows of one source."""
    if spec.name is not None:
        from fedfm.data.sources import digits

        return digits.read()
    if spec.hub is not None:
        from fedfm.data.sources import hub

        return hub.read(spec.hub, spec, task=task)
    from fedfm.data import files
    from fedfm.data.sources._files import existing

    return files.read(existing(spec.path or "", "data.path"), spec, task, labelled=True)


def _fit(table: Table, task: str | None) -> Table:
    """Return the table; raise an InputError if it does not fit the task, or has no training rows."""
    if (named := tasks.task_named(task)) is not None and table.kind not in named.table_kinds:
        wanted = " or ".join(words_of(kind) for kind in named.table_kinds)
        fits = tasks.implied_task(table.kind)
        raise InputError(
            f'model.task: "{task}" needs {wanted}; {table.source} holds {words_of(table.kind)}, for task "{fits}"'
        )
    if len(table.rows("train")) == 0:
        have = ", ".join(f"{len(table.rows(s))} {s}" for s in ("val", "test"))
        raise InputError(f"{table.source} has no training rows ({have}): mark some as train")
    return table


def _mark_test(table: Table, spec: DataSpec, rng: np.random.Generator) -> Table:
    """The table with its own test rows, or with ``test_fraction`` of its training rows as test rows."""
    rows = table.rows("train")
    if len(table.rows("test")) or spec.test_fraction == 0:
        return table
    if len(table.rows("val")):
        note = f"{table.source} marks validation rows and no test rows: test rows are taken from its training rows"
        table = replace(table, notices=(*table.notices, note))
    if (of := tasks.row_kind(table.kind)) is not None and of.joined:
        # Only the end of the text is held out: random passages would be adjacent to training passages.
        count = min(max(1, round(spec.test_fraction * len(rows))), len(rows) - 1)
        held = rows[len(rows) - count :]
    else:
        values = _owner_to_be(table, spec)
        labels = np.zeros(len(table), dtype=np.int64) if table.labels is None else table.labels
        parts = [rows[values[rows] == value] for value in np.unique(values[rows])]
        held = np.concatenate([hold_out(labels[part], part, spec.test_fraction, rng) for part in parts])
    if not len(held):
        note = f"{table.source} has too few rows to hold any out: there are no test rows"
        return replace(table, notices=(*table.notices, note))
    split = table.split.astype("<U5")
    split[held] = "test"
    table = replace(table, split=split)
    if not table.columns:
        return table
    from fedfm.data.repetitions import shared_groups

    shared = shared_groups(table, spec.partition.column)
    return replace(table, notices=(*table.notices, shared)) if shared else table


def _owner_to_be(table: Table, spec: DataSpec) -> np.ndarray:
    """The index of each row's client (N,) if a column names the clients, else zeros."""
    column = CLIENT if spec.clients else spec.partition.column  # None unless the partition is by_column
    if column not in table.columns:
        return np.zeros(len(table), dtype=np.int64)
    number: np.ndarray = np.unique(table.columns[column], return_inverse=True)[1]
    return number


def _limit(table: Table, spec: DataSpec, rng: np.random.Generator) -> Table:
    if spec.limit is None:
        return table
    rows = table.rows("train")
    groups = np.zeros(len(table), dtype=np.int64) if table.labels is None else table.labels
    groups = groups + max(1, len(table.classes)) * _owner_to_be(table, spec)
    kept = thin(groups[rows], rows, spec.limit, rng)
    return table.take(np.sort(np.concatenate([kept, np.flatnonzero(table.split != "train")])))
