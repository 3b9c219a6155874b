"""The figures of a survey, from the sums of all silos, and the risks that follow from them by stated rules.

Drift between silos is the share of the spread that the silo explains, 1 - W/T: the correlation ratio eta^2 of an
analysis of variance (Fisher 1925), and for classes Goodman and Kruskal's tau (Light, Margolin. JASA 66, 1971). Silos
without drift have (K - 1)/(n - 1) of it by chance, so ``adjusted`` subtracts that: 1 - (W/(n - K)) / (T/(n - 1)),
epsilon^2 of Kelley (PNAS 21, 1935). Within classes it is the same, over the pairs of a silo and a class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedfm.methods._survey_sums import BY_CLASS, FEATURES, ROWS, SILOS, TARGETS, Array, Block

MISSING = "missing"
_LEAST_SPREAD = 1e-9  # smaller spreads are rounding
_SKEW, _DRIFT, _FEW_ROWS, _FEW_SILOS, _IMBALANCE, _GAPS, _FAR = 0.1, 0.05, 100, 3, 10, 0.01, 0.1


def figures_of(
    sums: Mapping[str, Array], blocks: Sequence[Block], silos: int, least: int, deviations: Mapping[str, float] | None
) -> dict[str, Any]:
    """The figures of all silos together.

    Args:
        silos: number of silos in the sums.
        least: counts from 1 to ``least`` - 1 are hidden (None).
        deviations: under noise its standard deviation on an entry of a sum (``count``) and on the spread of each block
            (its name); None without noise.
    """
    rows = float(sums[ROWS][0])
    found: dict[str, Any] = {"silos": silos, "rows": _count(rows, least), "hidden_below": least}
    counts: dict[str, Any] = {}
    for block in blocks:
        total, within = sums[f"{block.name}.sum"], float(sums[f"{block.name}.within"][0])
        drift = _drift(block, total, within, rows, silos, deviations)
        if block.name == FEATURES:
            if rows >= least:
                spread = max(block.total_spread(total, rows) / rows, 0.0)
                found[FEATURES] = {"dimension": block.size, "mean": (total / rows).tolist(), "variance": spread} | drift
        elif np.abs(total).max(initial=0.0) > 0:
            values = _hide(total, rows if block.most == 1 else None, least, deviations)
            counts[block.name] = {"groups": list(block.groups), "counts": values} | drift
    found["counts"] = counts
    if f"{BY_CLASS}.sum" in sums and FEATURES in found:
        found[FEATURES]["within_classes"] = _drift_within(sums, rows)
    if deviations is not None:
        found["noise"] = {"deviation_of_counts": deviations["count"]}
    return found


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


def _drift(
    block: Block,
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


def silo_figures(parts: Mapping[str, Mapping[str, Array]], blocks: Sequence[Block], least: int) -> dict[str, Any]:
    """For each silo its rows, and its distances from the mean of all rows: of targets and of features.

    ``targets`` is the total variation distance of its shares. ``features`` is the squared distance of its mean of
    features, divided by the variance of all rows; ``by_chance`` of it is expected of as many rows drawn from all.
    """
    known = {name: part for name, part in parts.items() if part[SILOS][0] > 0.5}
    every = {name: np.sum([part[name] for part in known.values()], axis=0) for name in next(iter(known.values()), {})}
    found: dict[str, Any] = {name: {"rows": None} for name in parts}
    for name, part in known.items():
        own, rows = float(part[ROWS][0]), float(every[ROWS][0])
        found[name] = {"rows": _count(own, least)}
        for block in blocks:
            total, mine = every[f"{block.name}.sum"], part[f"{block.name}.sum"]
            if block.name == TARGETS and total.sum() > 0 and mine.sum() > 0:
                found[name][TARGETS] = float(np.abs(mine / mine.sum() - total / total.sum()).sum() / 2)
            if block.name == FEATURES and (variance := block.total_spread(total, rows) / rows) > _LEAST_SPREAD:
                apart = mine / own - total / rows
                found[name][FEATURES] = float(apart @ apart) / variance
                found[name]["by_chance"] = 1 / own - 1 / rows
    return found


def risks_of(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Risks that follow from the figures: for each ``risk``, ``figure``, ``value``, ``rule`` and ``advice``.

    The limits of the rules are rules of thumb, no measurements of these rows.
    """
    found: list[dict[str, Any]] = []

    def add(risk: str, figure: str, value: float, rule: str, advice: str) -> None:
        found.append({"risk": risk, "figure": figure, "value": value, "rule": rule, "advice": advice})

    counts, features = figures["counts"], figures.get(FEATURES, {})
    targets = counts.get(TARGETS, {})
    skew = targets.get("adjusted")
    if skew is not None and skew >= _SKEW:
        text = "one round whose result does not depend on the partition (analytic, fedncm, fedpft); with rounds "
        text += "scaffold or fedprox, and few local epochs"
        add("skew of targets", "counts.targets.adjusted", skew, f"at least {_SKEW}", text)
    within = features.get("within_classes", {}).get("adjusted")
    apart, name = (within, "features.within_classes.adjusted") if within is not None else (None, "")
    if within is None and (skew is None or skew < _SKEW):  # else skew of targets may be the cause
        apart, name = features.get("adjusted"), "features.adjusted"
    if apart is not None and apart >= _DRIFT:
        text = "a model for each silo (ditto, fedper, fedbip, fedala); hold out a whole silo to see what a shared "
        text += "model does on a new one"
        add("drift of features", name, apart, f"at least {_DRIFT}", text)
    rows, silos = figures["rows"], figures["silos"]
    if rows is not None and silos and rows / silos < _FEW_ROWS:
        text = "train little: adaptation head, or lora of a small rank; noise for records will cost accuracy; fedpft "
        text += "withholds classes of few rows"
        add("small silos", "rows / silos", rows / silos, f"below {_FEW_ROWS}", text)
    if silos < _FEW_SILOS:
        text = "secure sums need three silos, and of two silos each knows the other's part of a sum: use noise for "
        text += "records"
        add("few silos", "silos", silos, f"below {_FEW_SILOS}", text)
    known = [n for n in targets.get("counts", ()) if n]
    if len(known) > 1 and max(known) >= _IMBALANCE * min(known):
        text = "read balanced accuracy and macro F1; analytic takes class_weights"
        ratio = max(known) / min(known)
        add("unequal classes", "largest / smallest count", ratio, f"at least {_IMBALANCE}", text)
    gaps = _share_of_gaps(counts.get(MISSING), rows)
    if gaps is not None and gaps >= _GAPS:
        text = "let each silo look for these rows before training: they are read as they are"
        add("missing values", "rows with something missing / rows", gaps, f"at least {_GAPS}", text)
    far = features.get("from_reference", {}).get("distance")
    if far is not None and far >= _FAR:
        text = "rows unlike the reference: adapt the backbone (lora, top_layers, full), not only a head"
        add("drift from the reference", "features.from_reference.distance", far, f"at least {_FAR}", text)
    return found


def _share_of_gaps(missing: Mapping[str, Any] | None, rows: int | None) -> float | None:
    """The share of rows with something missing; None if it is hidden. The first group is that nothing is missing."""
    if missing is None or not rows or missing["counts"][0] is None:
        return None
    return float(max(rows - missing["counts"][0], 0) / rows)


def distance_from(features: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """The squared distance of two means of features, divided by the reference's variance."""
    apart = np.asarray(features["mean"]) - np.asarray(reference["mean"])
    return float(apart @ apart) / max(float(reference["variance"]), _LEAST_SPREAD)
