"""Write predictions as the arrays of an npz file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.errors import InputError


def to_npz(rows: Sequence[Mapping[str, Any]], out: Path) -> bytes:
    """The content of an npz file with an array (n, ...) for each key of the rows. Floating-point arrays are float32.

    Raises:
        InputError: the values of a key form no array: their lengths differ, or they are neither numbers nor texts.
    """
    arrays: dict[str, Any] = {}
    for key in rows[0] if rows else ():
        try:
            array = np.array([row[key] for row in rows])
        except ValueError:  # lists of unequal length
            array = np.empty(0, dtype=object)
        if array.dtype.kind not in "biufU":
            raise InputError(f"--out {out}: the values of {key!r} are not an array; use .json, .jsonl or .csv")
        arrays[key] = array.astype(np.float32) if array.dtype.kind == "f" else array
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()
