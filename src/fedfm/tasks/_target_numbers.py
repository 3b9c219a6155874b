"""Read the numbers of a column of targets, and doubt those that probably mean something else."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedfm.data.feature_doubts import marks_of
from fedfm.data.sources._sheet import Sheet
from fedfm.errors import InputError

LARGEST = 1e30  # largest absolute value of a target; a larger one is a mark or an error
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_COMMA = re.compile(r"[-+]?\d+,\d+")
_THOUSANDS, _BELOW_1000 = re.compile(r"[-+]?[1-9]\d{0,2}\.\d{3}"), re.compile(r"[-+]?\d{1,3}")
_SEVERAL = 3  # with fewer numbers three digits behind the dot may be chance
_FAR = 100.0  # if the deviation exceeds this number of interquartile ranges, a few distant numbers cause it


def doubts(cells: Sequence[Sequence[Any]], columns: Sequence[np.ndarray], names: Sequence[str]) -> tuple[str, ...]:
    """Notices about targets that mark missing values, are far from the others, or have dots between thousands.

    Args:
        cells: each target's values in the file.
        columns: the same values as numbers (N,).
    """
    found = list(filter(None, map(_dots, cells, names)))
    for values, name in zip(columns, names, strict=True):
        if marks := marks_of(values):
            rows = int(np.isin(values, marks).sum())
            listed = " or ".join(f"{mark:g}" for mark in marks)
            found.append(
                f'"{name}" is {listed} in {rows} of {len(values)} rows, far from its other numbers: it is trained like '
                "any other number; if it marks rows without a number, remove these rows"
            )
        elif (middle := float(np.subtract(*np.percentile(values, [75, 25])))) and values.std() > _FAR * middle:
            most = values[np.abs(values - np.median(values)).argmax()]
            found.append(
                f'"{name}" has numbers such as {most:g}, and half of its {len(values)} numbers lie within '
                f"{middle:.3g}: the model hardly tells these apart if such numbers stay; are they marks or mistakes?"
            )
    return tuple(found)


def numbers(values: Sequence[Any], name: str, sheet: Sheet) -> np.ndarray:
    """A column of finite numbers (N,), float64."""
    return np.array([_number(value, name, sheet, row) for row, value in enumerate(values)], dtype=np.float64)


def _number(value: Any, name: str, sheet: Sheet, row: int) -> float:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise InputError(f'{sheet.at(row)}: column "{name}" is empty: give a number, or remove the row')
    found, hint = math.nan, ""
    if isinstance(value, str):
        if _NUMBER.fullmatch(value.strip()):
            found = float(value)
        elif _COMMA.fullmatch(value.strip()):
            hint = ", with a decimal point and no other separator"
    elif isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
        found = float(value)
    if not math.isfinite(found):
        raise InputError(f'{sheet.at(row)}: column "{name}" holds {value!r:.40}: a finite number is expected{hint}')
    if abs(found) > LARGEST:
        raise InputError(
            f'{sheet.at(row)}: column "{name}" holds {found:g}: expected numbers up to {LARGEST:g}; use another unit'
        )
    return found


def _dots(values: Sequence[Any], name: str) -> str | None:
    """A notice about numbers whose dots seem to separate thousands, as in German: 1.234 next to 987.

    All have three digits behind the dot and none before it is zero, and others are whole and below 1000. A program that
    writes decimals would also write 0.5 or 12.3, or three digits behind each number.
    """
    texts = [value.strip() for value in values if isinstance(value, str)]
    dotted = [text for text in texts if _THOUSANDS.fullmatch(text)]
    whole = [text for text in texts if _BELOW_1000.fullmatch(text)]
    if len(dotted) < _SEVERAL or not whole or len(dotted) + len(whole) < len(values):
        return None
    return (
        f'"{name}" has numbers such as {whole[0]} and {dotted[0]}: the dot is read as a decimal point; if it separates '
        "thousands, remove it"
    )
