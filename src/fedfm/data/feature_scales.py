"""Scale feature vectors, in training and in predictions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedfm.data.table import Table, words_of
from fedfm.errors import InputError


def scale_features(table: Table, scale: str) -> Table:
    """Scale each feature vector: "row" to mean 0 and variance 1 (constant vectors to 0), "unit" to norm 1."""
    if scale == "none":
        return table
    if table.kind != "features":
        raise InputError(f'data.scale: "{scale}" is for feature vectors; {table.source} holds {words_of(table.kind)}')
    x = table.inputs.astype(np.float64)  # (N, d)
    if scale == "row":
        x = x - x.mean(axis=1, keepdims=True)
        size = x.std(axis=1, keepdims=True)
    else:
        size = np.linalg.norm(x, axis=1, keepdims=True)
    return replace(table, inputs=np.divide(x, size, out=np.zeros_like(x), where=size > 0).astype(np.float32))
