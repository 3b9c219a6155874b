"""The risks that follow from the figures of a survey, by stated rules.

The limits are rules of thumb, not measurements of these rows. Each risk is reported with its figure and its limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

FEATURES, TARGETS, MISSING = "features", "targets", "missing"
_SKEW, _DRIFT, _FAR = 0.1, 0.05, 0.1  # shares of a spread beyond chance; a squared distance over a variance
_NARROW = 0.5  # share of the effective number of groups of all rows
_FEW_ROWS, _FEW_SILOS, _IMBALANCE, _GAPS = 100, 3, 10, 0.01
_LEAST_SPREAD = 1e-9  # smaller spreads are rounding


def risks_of(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Risks that follow from the figures: for each ``risk``, ``figure``, ``value``, ``rule`` and ``advice``.

    The limits of the rules are rules of thumb, not measurements of these rows.
    """
    found: list[dict[str, Any]] = []

    def add(risk: str, figure: str, value: float, rule: str, advice: str) -> None:
        found.append({"risk": risk, "figure": figure, "value": value, "rule": rule, "advice": advice})

    counts, features = figures["counts"], figures.get(FEATURES, {})
    targets = counts.get(TARGETS, {})
    skew, figure, is_skewed = targets.get("adjusted"), "counts.targets.adjusted", False
    rule, number = f"at least {_SKEW}", targets.get("effective_groups", {})
    if number.get("silo") is not None and number.get("all") is not None:
        skew, figure = number["silo"] / number["all"], "effective groups of a silo / of all rows"
        rule, is_skewed = f"at most {_NARROW}", skew <= _NARROW
    elif skew is not None:
        is_skewed = skew >= _SKEW
    if skew is not None and is_skewed:
        text = "one round whose result does not depend on the partition (analytic, fedncm, fedpft); with rounds "
        text += "scaffold or fedprox, and few local epochs"
        add("skew of targets", figure, skew, rule, text)
    within = features.get("within_classes", {}).get("adjusted")
    apart, name = (within, "features.within_classes.adjusted") if within is not None else (None, "")
    if within is None and not is_skewed:  # else skew of targets may be the cause
        apart, name = features.get("adjusted"), "features.adjusted"
    if apart is not None and apart >= _DRIFT:
        text = "a model for each silo (ditto, fedper, fedbip, fedala); hold out a whole silo to see what a shared "
        text += "model does on a new one"
        add("drift of features", name, apart, f"at least {_DRIFT}", text)
    rows, silos = figures["rows"], figures["silos"]
    if rows is not None and silos and rows / silos < _FEW_ROWS:
        text = "train few parameters: adaptation head, or lora of a small rank; noise for records will cost accuracy; "
        text += "fedpft withholds classes of few rows"
        add("small silos", "rows / silos", rows / silos, f"below {_FEW_ROWS}", text)
    if silos < _FEW_SILOS:
        text = "secure sums need three silos, since each of two silos knows the other's part of the sum: use noise for "
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
        add("missing values", "rows with missing values / rows", gaps, f"at least {_GAPS}", text)
    far = features.get("from_reference", {}).get("distance")
    if far is not None and far >= _FAR:
        text = "rows unlike the reference: adapt the backbone (lora, top_layers, full), not only a head"
        add("drift from the reference", "features.from_reference.distance", far, f"at least {_FAR}", text)
    return found


def _share_of_gaps(missing: Mapping[str, Any] | None, rows: int | None) -> float | None:
    """The share of rows with missing values; None if it is hidden. The first count is of rows that lack nothing."""
    if missing is None or not rows or missing["counts"][0] is None:
        return None
    return float(max(rows - missing["counts"][0], 0) / rows)


def distance_from(features: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """The squared distance of two means of features, divided by the reference's variance."""
    apart = np.asarray(features["mean"]) - np.asarray(reference["mean"])
    return float(apart @ apart) / max(float(reference["variance"]), _LEAST_SPREAD)
