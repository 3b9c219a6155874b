"""The figures of a survey, from the sums of all silos.

Drift between silos is the share of the spread that the silo explains, 1 - W/T: the correlation ratio eta^2 of an
analysis of variance (Fisher 1925), and for classes Goodman and Kruskal's tau (Light, Margolin. JASA 66, 1971). Even
without drift this share is (K - 1)/(n - 1) on average, by chance. ``adjusted`` subtracts this: 1 - (W/(n - K)) /
(T/(n - 1)), epsilon^2 of Kelley (PNAS 21, 1935). For drift within classes, pairs of a silo and a class replace silos.

If there are many groups, this share is small even if each silo has few of them. So properties with one group a row also
have the effective number of groups, 1 / sum p^2 (Hill. Ecology 54, 1973), of all rows and of the mean silo: the sum of
p^2 is 1 - T/(n - 1) and, over silos, 1 - W/(n - K), both without bias by few rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedfm.methods._survey_sums import BY_CLASS, FEATURES, ROWS, SILOS, TARGETS, Array, SurveyBlock

_LEAST_SPREAD = 1e-9  # smaller spreads are rounding


def figures_of(
    sums: Mapping[str, Array],
    blocks: Sequence[SurveyBlock],
    silos: int,
    least: int,
    deviations: Mapping[str, float] | None,
    *,
    by_silo: bool = False,
) -> dict[str, Any]:
    """The figures of all silos together.

    An exact drift of groups would disclose single silos' counts, since counts are whole numbers: of two silos and two
    groups it determines, with the totals, both silos' rows by group. So it has three digits, and of two silos there is
    none, except where noise covers it, or the figures show each silo anyway.

    Args:
        silos: number of silos in the sums.
        least: counts from 1 to ``least`` - 1 are hidden (None).
        deviations: under noise its standard deviation on an entry of a sum (``count``) and on the spread of each block
            (its name); None without noise.
        by_silo: whether :func:`silo_figures` are shown, too.
    """
    exact = deviations is not None or by_silo
    round_figure: Callable[[float | None], float | None] = (
        _same if exact else _leave_out if silos == 2 else _round_figure
    )
    rows = float(sums[ROWS][0])
    found: dict[str, Any] = {"silos": silos, "rows": _count(rows, least), "hidden_below": least}
    counts: dict[str, Any] = {}
    for block in blocks:
        total, within = sums[f"{block.name}.sum"], float(sums[f"{block.name}.within"][0])
        if block.name == FEATURES:
            if rows >= least:
                spread = max(block.total_spread(total, rows) / rows, 0.0)
                drift = _drift(block, total, within, rows, silos, deviations)
                found[FEATURES] = {"dimension": block.size, "mean": (total / rows).tolist(), "variance": spread} | drift
        elif np.abs(total).max(initial=0.0) > 0:
            values = _hide(total, rows if block.most == 1 else None, least, deviations)
            if block.most == 1 and None in values:
                total = _split_hidden(values, rows)
                round_figure = _round_figure if round_figure is _same else round_figure
                within = block.total_spread(total, rows) if silos == 1 else within
            drift = _drift(block, total, within, rows, silos, deviations)
            counts[block.name] = {"groups": list(block.groups), "counts": values} | {
                key: round_figure(value) for key, value in drift.items()
            }
            if block.most == 1 and drift["between"] is not None:
                spread = block.total_spread(total, rows)
                error = 0.0 if deviations is None else 3 * deviations[block.name] / rows
                counts[block.name]["effective_groups"] = {
                    "all": _effective(1 - spread / (rows - 1), error),
                    "silo": round_figure(_effective(1 - within / (rows - silos), error)),
                }
    found["counts"] = counts
    if f"{BY_CLASS}.sum" in sums and FEATURES in found:
        found[FEATURES]["within_classes"] = _drift_within(sums, rows)
    if deviations is not None:
        found["noise"] = {"deviation_of_counts": deviations["count"]}
    return found


def _effective(squares: float, error: float) -> float | None:
    """1 / sum p^2; None if the sum is not above its error by noise, or by rounding and chance."""
    return 1 / squares if squares > max(error, _LEAST_SPREAD) else None


def _count(value: float, least: int) -> int | None:
    """A number of rows; None if it is too small to be shown."""
    whole = max(round(value), 0)
    return None if 0 < whole < least else whole


def _hide(total: Array, rows: float | None, least: int, deviations: Mapping[str, float] | None) -> list[int | None]:
    """Counts, without those below ``least``. Under noise, which covers them, all are shown.

    If rows are known in total, hidden counts follow from the others by subtraction. So further counts, the smallest
    first, are hidden until the hidden ones have at least ``least`` rows together and are at least two.
    """
    counts = [max(round(float(v)), 0) for v in total]
    if deviations is not None:
        return list(counts)
    hidden = {j for j, n in enumerate(counts) if 0 < n < least}
    outside = 0 if rows is None else max(round(rows) - sum(counts), 0)  # rows that are in no group
    if 0 < outside < least:
        hidden |= {-1}
    order = sorted((j for j, n in enumerate(counts) if n and j not in hidden), key=lambda j: (counts[j], j))
    while rows is not None and hidden and order:
        together = sum(counts[j] if j >= 0 else outside for j in hidden)
        if len(hidden) > 1 and together >= least:
            break
        hidden.add(order.pop(0))
    return [None if j in hidden else n for j, n in enumerate(counts)]


def _split_hidden(counts: list[int | None], rows: float) -> Array:
    """The counts, with the rows of no shown group in equal parts in the hidden groups.

    The sum of squares of two counts and their sum determine both. So figures next to hidden counts are those of counts
    that a reader can compute from the shown ones.
    """
    hidden = sum(n is None for n in counts)
    rest = max(rows - sum(n for n in counts if n is not None), 0.0)
    return np.array([rest / hidden if n is None else float(n) for n in counts])


def _round_figure(value: float | None) -> float | None:
    """Three digits: exact spreads within silos would determine small counts in them."""
    return None if value is None else float(f"{value:.3g}")


def _same(value: float | None) -> float | None:
    return value


def _leave_out(value: float | None) -> float | None:
    return None


def _drift(
    block: SurveyBlock,
    total: Array,
    within: float,
    rows: float,
    silos: int,
    deviations: Mapping[str, float] | None,
) -> dict[str, float | None]:
    """``between``, ``adjusted``, and under noise ``deviation``: the standard deviation of ``between`` by its noise."""
    spread = block.total_spread(total, rows)
    of_sums = 0.0
    if deviations is not None and rows > 0:  # noise adds its own square to |S|^2
        of_sums = deviations["count"]
        spread += block.size * of_sums**2 / rows
    nothing: dict[str, float | None] = {"between": None, "adjusted": None}
    if rows <= silos or spread <= _LEAST_SPREAD * max(rows, 1.0):
        return nothing
    between = 1 - within / spread
    found: dict[str, float | None] = {
        "between": min(max(between, 0.0), 1.0),
        "adjusted": min(max(1 - (within / (rows - silos)) / (spread / (rows - 1)), 0.0), 1.0),
    }
    if deviations is not None:
        mean = float(np.linalg.norm(total)) / rows
        deviation = math.hypot(deviations[block.name], 2 * mean * of_sums) / spread
        if deviation > 1:
            return nothing
        found["deviation"] = deviation
    return found


def _drift_within(sums: Mapping[str, Array], rows: float) -> dict[str, float | None]:
    """Drift of features between silos among rows of one class."""
    counts, total = sums[f"{TARGETS}.sum"], sums[f"{BY_CLASS}.sum"]
    held = counts > 0.5
    spread = float(counts.sum()) - float(((total[held] ** 2).sum(1) / counts[held]).sum())
    within, cells = float(sums[f"{BY_CLASS}.within"][0]), float(sums[f"{BY_CLASS}.cells"][0])
    classes = int(held.sum())
    if spread <= _LEAST_SPREAD * max(rows, 1.0) or rows <= cells:
        return {"between": None, "adjusted": None}
    adjusted = 1 - (within / (rows - cells)) / (spread / (rows - classes))
    return {"between": min(max(1 - within / spread, 0.0), 1.0), "adjusted": min(max(adjusted, 0.0), 1.0)}


def _distance_step(parts: Mapping[str, Mapping[str, Array]], least: int) -> float:
    """The rows to which distances of targets are rounded: ``least`` if a silo has a count from 1 to ``least`` - 1.

    With two classes a distance, the silo's rows and all counts determine the silo's counts, and those of all silos but
    one determine the last one's.
    """
    counts = [part[f"{TARGETS}.sum"] for part in parts.values() if f"{TARGETS}.sum" in part]
    return float(least) if any(((c > 0.5) & (c < least - 0.5)).any() for c in counts) else 0.0


def silo_figures(parts: Mapping[str, Mapping[str, Array]], blocks: Sequence[SurveyBlock], least: int) -> dict[str, Any]:
    """For each silo its rows, and its distances from the mean of all rows: of targets and of features.

    ``targets`` is the total variation distance of its shares (:func:`_distance_step`). ``features`` is the squared
    distance of its mean of features, divided by the variance of all rows; ``by_chance`` is expected of as many rows
    drawn from all.
    """
    known = {name: part for name, part in parts.items() if part[SILOS][0] > 0.5}
    every = {name: np.sum([part[name] for part in known.values()], axis=0) for name in next(iter(known.values()), {})}
    found: dict[str, Any] = {name: {"rows": None} for name in parts}
    step = _distance_step(known, least)
    for name, part in known.items():
        own, rows = float(part[ROWS][0]), float(every[ROWS][0])
        found[name] = {"rows": _count(own, least)}
        for block in blocks:
            total, mine = every[f"{block.name}.sum"], part[f"{block.name}.sum"]
            if block.name == TARGETS and total.sum() > 0 and mine.sum() > 0:
                apart = float(np.abs(mine / mine.sum() - total / total.sum()).sum() / 2)
                size = step / float(mine.sum())
                found[name][TARGETS] = min(round(apart / size) * size, 1.0) if step else apart
            if block.name == FEATURES and (variance := block.total_spread(total, rows) / rows) > _LEAST_SPREAD:
                apart = mine / own - total / rows
                found[name][FEATURES] = float(apart @ apart) / variance
                found[name]["by_chance"] = 1 / own - 1 / rows
    return found
