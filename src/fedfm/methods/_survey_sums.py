"""The sums of a survey: what a silo adds up, the factors for the noise, and conditions that sums of rows satisfy.

For each property a silo sends S_k = sum x over its n_k rows and the spread within the silo, W_k = sum |x - S_k/n_k|^2.
Entries of x are memberships, 0 or 1, or the features of a row divided by their norm. So sum |x|^2 follows from S_k or
n_k, and the sums over silos give the analysis of variance of the pooled rows: total spread T = sum |x|^2 - |S|^2/n,
within silos W = sum W_k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedfm.linalg.params import Layout, Params
from fedfm.privacy.noise import unit_rows

Array = NDArray[np.float64]

FEATURES, BY_CLASS, ROWS, SILOS, TARGETS = "features", "features_by_class", "rows", "silos", "targets"
_STEP = 2.0**-24  # sums under noise lie on the lattice of fedfm.aggregation._record_shares
_SLACK = 2.0**-20  # sensitivity set apart for the rounding of a spread to the lattice
_TOLERANCE = 1e-6  # relative error of sums under secure aggregation, and of float64


@dataclass(frozen=True)
class SurveyBlock:
    """A property as the sums have it.

    Attributes:
        name: the property's name.
        groups: names of its entries; () for features.
        size: number of entries of x.
        most: largest |x|^2 of a row.
    """

    name: str
    groups: tuple[str, ...]
    size: int
    most: int

    @property
    def spread_bound(self) -> float:
        """The largest change of W_k by one row, below sup |x - y|^2 over vectors x, y that rows can have.

        If a row x joins n others of mean m, W_k grows by n/(n+1) |x - m|^2.
        """
        return 4.0 if self.name == FEATURES else 2.0 * self.most

    def squares(self, total: Array, rows: float) -> float:
        """The sum of |x|^2 over all rows, from S and their number."""
        return rows if self.name == FEATURES else float(total.sum())

    def total_spread(self, total: Array, rows: float) -> float:
        """T = sum |x|^2 - |S|^2/n."""
        return self.squares(total, rows) - float(total @ total) / rows if rows > 0 else 0.0


@dataclass(frozen=True)
class SurveyScale:
    """Factors that give a message of sensitivity 1 for one row more or less.

    A row changes the number of rows by 1, each S by at most sqrt(most), and each W by at most ``spread_bound``.

    Attributes:
        row: factor of S and of the number of rows, a multiple of the lattice's step.
        spread: factor of W divided by its bound.
    """

    row: float
    spread: float

    @classmethod
    def of(cls, blocks: Sequence[SurveyBlock]) -> SurveyScale:
        norm = math.sqrt(1 + sum(block.most + 1 for block in blocks))
        row = math.floor(1 / norm / _STEP) * _STEP
        return cls(row, row - _SLACK)


def layout_of(blocks: Sequence[SurveyBlock], classes: int, *, noisy: bool) -> Layout:
    """The layout of a message.

    Args:
        classes: the number of classes by which features are also summed; 0 for none.
    """
    sizes: dict[str, tuple[int, ...]] = {ROWS: (1,)} if noisy else {ROWS: (1,), SILOS: (1,)}
    for block in blocks:
        sizes |= {f"{block.name}.sum": (block.size,), f"{block.name}.within": (1,)}
    if classes:
        d = next(block.size for block in blocks if block.name == FEATURES)
        sizes |= {f"{BY_CLASS}.sum": (classes, d), f"{BY_CLASS}.within": (1,), f"{BY_CLASS}.cells": (1,)}
    return Params({name: torch.zeros(shape, dtype=torch.float64) for name, shape in sizes.items()}).layout


def sums_of(members: Mapping[str, Array], count: int) -> dict[str, Array]:
    """The sums of a silo's rows.

    Args:
        members: for each block the rows' vectors (n, size).
        count: n.
    """
    found: dict[str, Array] = {ROWS: np.array([float(count)]), SILOS: np.ones(1)}
    for name, x in members.items():
        total = x.sum(0)
        squares = float(count) if name == FEATURES else float(total.sum())
        found |= {f"{name}.sum": total, f"{name}.within": np.array([max(squares - total @ total / count, 0.0)])}
    return found


def sums_by_class(x: Array, members: Array) -> dict[str, Array]:
    """The sums of features x (n, d) by class, of rows with one class each: ``members`` (n, C)."""
    total, counts = members.T @ x, members.sum(0)  # (C, d), (C,)
    held = counts > 0
    within = float(counts.sum()) - float(((total[held] ** 2).sum(1) / counts[held]).sum())
    found = {"sum": total, "within": np.array([max(within, 0.0)]), "cells": np.array([float(held.sum())])}
    return {f"{BY_CLASS}.{name}": value for name, value in found.items()}


def scaled_sums(members: Mapping[str, Array], count: int, blocks: Sequence[SurveyBlock]) -> dict[str, Array]:
    """The sums in units of :class:`SurveyScale`, on the lattice, so that noise of deviation sigma covers a row."""
    scale = SurveyScale.of(blocks)
    found = {ROWS: np.array([count * scale.row])}
    for block in blocks:
        x = members[block.name]
        total = (np.trunc(x * scale.row / _STEP) * _STEP).sum(0)
        exact = x.sum(0)
        squares = float((x**2).sum())
        within = max(squares - float(exact @ exact) / max(count, 1), 0.0) / block.spread_bound
        found |= {f"{block.name}.sum": total, f"{block.name}.within": np.array([within * scale.spread])}
        found[f"{block.name}.within"] = np.floor(found[f"{block.name}.within"] / _STEP) * _STEP
    return found


def unscaled_sums(total: Mapping[str, Array], blocks: Sequence[SurveyBlock]) -> dict[str, Array]:
    """Sums of all silos in the units of rows, from those of :func:`scaled_sums`."""
    scale = SurveyScale.of(blocks)
    found = {ROWS: total[ROWS] / scale.row}
    for block in blocks:
        found[f"{block.name}.sum"] = total[f"{block.name}.sum"] / scale.row
        found[f"{block.name}.within"] = total[f"{block.name}.within"] * block.spread_bound / scale.spread
    return found


def unit_features(x: Array) -> Array:
    """Features (n, d) divided by their norm; see :func:`fedfm.privacy.noise.unit_rows`."""
    return unit_rows(x)


def fault_of(sums: Mapping[str, Array], blocks: Sequence[SurveyBlock], silos: int, most_rows: int) -> str | None:
    """Why rows of this number of silos cannot have these sums; None if they can.

    The sums of one silo determine its spreads, so they must agree. Those of several silos lie between bounds.
    """
    rows, there = float(sums[ROWS][0]), float(sums[SILOS][0])
    slack = _TOLERANCE * (1 + abs(rows))
    if not (0 <= rows <= most_rows * silos and min(abs(there - k) for k in (0, round(there))) <= slack):
        return f"{rows:g} rows: expected at most {most_rows} of each silo (method.most_rows)"
    if there > silos + slack or (rows > slack and there < 1 - slack):
        return f"{rows:g} rows of {there:g} silos, and {silos} answered"
    for block in blocks:
        total, within = sums[f"{block.name}.sum"], float(sums[f"{block.name}.within"][0])
        if block.name == FEATURES:
            wrong = float(np.linalg.norm(total)) > rows + slack
        else:
            wrong = bool((total < -slack).any() or (total > rows + slack).any())
            wrong |= float(total.sum()) > block.most * rows + slack
        spread = block.total_spread(total, rows)
        limit = slack * block.most * 4
        wrong |= not -limit <= within <= spread + limit or (silos == 1 and within < spread - limit)
        if wrong:
            return f"no {rows:g} rows have these sums of {block.name}"
    if f"{BY_CLASS}.sum" in sums and _is_wrong_by_class(sums, silos, slack):
        return f"no {rows:g} rows have these sums of features by class"
    return None


def _is_wrong_by_class(sums: Mapping[str, Array], silos: int, slack: float) -> bool:
    counts, total = sums[f"{TARGETS}.sum"], sums[f"{BY_CLASS}.sum"]
    within, cells = float(sums[f"{BY_CLASS}.within"][0]), float(sums[f"{BY_CLASS}.cells"][0])
    held = counts > 0.5
    if bool((np.linalg.norm(total, axis=1) > counts + slack).any()):
        return True
    spread = float(counts.sum()) - float(((total[held] ** 2).sum(1) / counts[held]).sum())
    if not -slack <= within <= spread + 4 * slack or (silos == 1 and within < spread - 4 * slack):
        return True
    return not held.sum() - slack <= cells <= silos * held.sum() + slack
