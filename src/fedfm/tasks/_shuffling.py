"""Shuffle the targets of rows, for an attacker that trains on them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedfm.data.table import Table
from fedfm.errors import InputError


def shuffle(rows: Table, rng: np.random.Generator) -> Table:
    """The rows with randomly permuted targets or labels.

    Raises:
        InputError: the rows have neither.
    """
    order = rng.permutation(len(rows))
    if rows.targets is not None:
        return replace(rows, targets=rows.targets[order])
    if rows.labels is None:
        raise InputError('attack.name = "label_shuffle": the rows have no labels to shuffle', key="attack.name")
    return replace(rows, labels=rows.labels[order])
