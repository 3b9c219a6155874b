"""Read rows to predict, which have no targets, and compare them with the rows of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedfm.core import tasks
from fedfm.data import files, pixel_values
from fedfm.data.doubts import of_features, of_texts
from fedfm.data.feature_scales import scale_features
from fedfm.data.profiles import compare, unknown_classes
from fedfm.data.sources._files import existing
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table, words_of
from fedfm.data.thumbnails import figures_of_images
from fedfm.errors import InputError


def read_inputs(
    path: str | Path,
    spec: DataSpec,
    *,
    kind: str | None,
    trained: Mapping[str, Any] | None = None,
    classes: Sequence[str] = (),
) -> Table:
    """Rows to predict, without labels, in any format of ``data.path``. A missing output of an instruction is "".

    A model trained on preferences predicts like one trained on instructions, so it takes rows of kind "instruction".

    Args:
        path: file or folder; a folder of images needs no classes.
        spec: names of the columns and the scale, as in training.
        kind: the kind of rows that the model reads; None if only another site knows it, and any kind is read.
        trained: the profile of the training rows; notices say how the rows to predict differ from it.
        classes: the model's classes; a notice names labels that are not among them.

    Returns:
        All rows in the order of the file; ``labels`` is None, and each row is marked "test".

    Raises:
        InputError: as in :func:`load_table`, or the file has another kind of rows, or other columns.
    """
    owner = None if kind is None else tasks.owner(kind)
    table = files.read(existing(path, "file"), spec, None if owner is None else owner.name, labelled=False)
    kind = (owner is not None and owner.own_kind is not None and owner.own_kind.predicted_as) or kind
    if kind is not None and table.kind != kind:
        raise InputError(f"{path} holds {words_of(table.kind)}; the model takes {words_of(kind)}")
    images = figures_of_images(table)
    table = replace(
        table, notices=(*table.notices, *pixel_values.notices(table, images), *of_features(table), *of_texts(table))
    )
    table = scale_features(table, spec.scale)
    if not trained and not classes:
        return table
    more = compare(trained, table, images) if trained else []
    named = unknown_classes(table, spec.label_name if spec.label_name in table.columns else spec.label, classes)
    return replace(table, notices=(*table.notices, *more, *([named] if named else [])))
