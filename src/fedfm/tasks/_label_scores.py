"""Scores of rows with several labels, from sums over rows that can be added.

AUROC and average precision need the order of the rows by their logits. A sum stores it as counts: for each label and
each logit, how many rows have the label and how many do not. Counts of several clients can be added.

In one process the logits are exact (float32), and so are the scores. At a silo, rows with neighbouring logits share
their mean logit before the counts leave it, see :func:`coarse_ranks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Array = np.ndarray
Ranks = list[int]  # triples (place, rows with the label, rows without it), by ascending place: label and logit

_KEYS = 1 << 32  # number of float32 values: a label has the places label * _KEYS to (label + 1) * _KEYS - 1
_EXACT = 1 << 16  # rows up to which logits are exact; those of more rows are rounded, so that the counts stay short
_FINE, _STEPS = 0.01, 1600  # of more rows: z is in bin floor(1600 asinh(z / 0.01)), 0.06 % of a logit wide
GROUP, _SHARE = 3, 0.05  # least size of a silo's groups; their size as a share of the rows beyond them
_DIGITS = 4  # of a group's mean logit


def rank_counts(logits: Array, targets: Array) -> Ranks:
    """The counts of rows by label and logit, from logits and targets (n, C)."""
    z = logits if len(logits) <= _EXACT else _rounded(logits)
    place = np.arange(logits.shape[1]) * _KEYS + _keys(z)  # (n, C)
    return _count_by_bin(place.ravel(), (targets > 0).ravel().astype(np.int64), (targets <= 0).ravel().astype(np.int64))


def _rounded(z: Array) -> Array:
    """Each logit replaced by the middle of its bin; zero is an edge."""
    bins = np.floor(np.arcsinh(z.astype(np.float64) / _FINE) * _STEPS)
    middles: Array = _FINE * np.sinh((bins + 0.5) / _STEPS)
    return middles


def coarse_ranks(ranks: Sequence[float], labels: int) -> Ranks:
    """The counts as a silo sends them: for each label, rows with neighbouring logits share their mean logit.

    A group has at least :data:`GROUP` rows, and one twentieth of the rows between it and the nearer end, so that the
    groups are small where a rare label is. Fewer rows than two groups are one group. Equal logits are in one group.
    """
    found = []
    for c, (z, with_label, without) in enumerate(_by_label(ranks, labels)):
        rows = np.cumsum(with_label + without)
        ends = np.array(_ends(rows), np.int64)
        starts = np.append(0, ends[:-1])[: len(ends)]
        count, positive, negative, total = (
            np.add.reduceat(values, starts) if len(ends) else values[:0]
            for values in (with_label + without, with_label, without, z * (with_label + without))
        )
        means = np.array([float(f"{mean:.{_DIGITS}g}") for mean in (total / count).tolist()])
        found.append(np.stack([c * _KEYS + _keys(means), positive, negative]))
    return _count_by_bin(*np.concatenate(found, axis=1)) if found else []


def _ends(rows: Array) -> list[int]:
    """Where the groups of a label end, as indexes into its logits; ``rows`` counts the rows up to each logit."""
    n = int(rows[-1]) if len(rows) else 0
    cuts, at = list[int](), 0
    while (at := at + max(GROUP, int(_SHARE * at))) <= n // 2:
        cuts.append(at)
    ends, before = list[int](), 0
    for cut in (*cuts, *(n - cut for cut in reversed(cuts))):
        end = int(np.searchsorted(rows, cut)) + 1
        if rows[end - 1] - before >= GROUP and n - rows[end - 1] >= GROUP:
            ends.append(end)
            before = int(rows[end - 1])
    return [*ends, len(rows)] if n else []


def _keys(z: Array) -> Array:
    """Whole numbers from 0 to 2^32 - 1 in the order of the values, which become float32."""
    bits = (np.nan_to_num(z).astype(np.float32) + np.float32(0)).view(np.int32).astype(np.int64)  # -0 becomes 0
    keys: Array = np.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits) + (_KEYS >> 1)
    return keys


def _values(keys: Array) -> Array:
    """The inverse of :func:`_keys`, as float64."""
    bits = keys - (_KEYS >> 1)
    found = np.where(bits < 0, (-1 - bits) | -(1 << 31), bits).astype(np.int32).view(np.float32)
    return np.nan_to_num(found.astype(np.float64))


def add_ranks(parts: Sequence[Sequence[float] | None]) -> Ranks | None:
    """The counts of the rows of all parts together; None if a part does not have them."""
    if None in parts:
        return None
    triples = np.concatenate([np.zeros((0, 3), np.int64), *(_triples(part or ()) for part in parts)])
    return _count_by_bin(*triples.T)


def _count_by_bin(place: Array, with_label: Array, without: Array) -> Ranks:
    places, of = np.unique(place, return_inverse=True)
    counts = [np.bincount(of, weights, len(places)).astype(np.int64) for weights in (with_label, without)]
    found: Ranks = np.stack([places, *counts], axis=1).ravel().tolist()
    return found


def _triples(ranks: Sequence[float]) -> Array:
    return np.asarray(ranks, np.float64).reshape(-1, 3).astype(np.int64)


def _by_label(ranks: Sequence[float], labels: int) -> list[tuple[Array, Array, Array]]:
    """Return for each label (logits, rows with the label, rows without it), by ascending logit."""
    place, with_label, without = _triples(ranks).T
    label, z = place // _KEYS, _values(place % _KEYS)
    return [(z[label == c], with_label[label == c], without[label == c]) for c in range(labels)]


def auroc(with_label: Array, without: Array) -> float | None:
    """The share of pairs (row with the label, row without it) in the right order; ties count half.

    Args:
        with_label, without: numbers of rows by ascending logit.

    Returns:
        None if all rows have the label, or none has it.

    Example:
        >>> auroc(np.array([0, 1]), np.array([2, 1]))
        0.8333333333333334
    """
    pairs = int(with_label.sum()) * int(without.sum())
    below = np.cumsum(without) - without
    return float((with_label * (below + without / 2)).sum() / pairs) if pairs else None


def average_precision(with_label: Array, without: Array) -> float | None:
    """The precision at the logit of each row with the label, averaged over these rows (as in scikit-learn).

    Args:
        with_label, without: numbers of rows by ascending logit.

    Returns:
        None if no row has the label, or all have it.

    Example:
        >>> average_precision(np.array([0, 1]), np.array([2, 1]))
        0.5
    """
    if not with_label.sum() or not without.sum():
        return None
    found, wrong = np.cumsum(with_label[::-1]), np.cumsum(without[::-1])
    return float((with_label[::-1] * found / (found + wrong)).sum() / with_label.sum())


def f1_by_label(labelled: Sequence[float], found: Sequence[float], right: Sequence[float]) -> list[float | None]:
    """F1 of each label; None if no row has the label and none was predicted to have it."""
    both = np.asarray(labelled, np.float64) + np.asarray(found, np.float64)
    return [2 * r / n if n else None for r, n in zip(right, both.tolist(), strict=True)]


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are defined; None if no value is defined."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def scores(sums: Mapping[str, Any]) -> dict[str, Any]:
    """All scores that follow from the sums of :class:`fedfm.tasks.multi_label.MultiLabel`; none without rows.

    A score that is undefined is None. A sum that is unknown is NaN, or a list with NaN.
    """
    if sums["rows"] == 0:
        return {}
    labelled, found, right = (_numbers(sums[key]) for key in ("positives", "predicted_positives", "true_positives"))
    known = all(map(math.isfinite, (*labelled, *found, *right)))
    f1 = f1_by_label(labelled, found, right) if known else []
    total = sum(labelled) + sum(found)
    ranks = _numbers(sums["ranks"])
    of = _by_label(ranks, len(labelled)) if known and all(map(math.isfinite, ranks)) else []
    aurocs = [auroc(positive, negative) for _, positive, negative in of]
    precisions = [average_precision(positive, negative) for _, positive, negative in of]
    return {
        "micro_f1": 2 * sum(right) / total if known and total else None,
        "macro_f1": mean_of_known(f1),
        "auroc": mean_of_known(aurocs),
        "average_precision": mean_of_known(precisions),
        "rows_by_label": list(map(int, labelled)) if known else None,
        "f1_by_label": f1 or None,
        "auroc_by_label": aurocs or None,
        "average_precision_by_label": precisions or None,
    }


def coarse_scores(found: Mapping[str, Any]) -> dict[str, Any]:
    """A silo's scores and sums with :func:`coarse_ranks`; all scores follow from the sums that are sent."""
    if found.get("ranks") is None:
        return dict(found)
    ranks = coarse_ranks(found["ranks"], len(found["positives"]))
    return {**found, "ranks": ranks, **scores({**found, "rows": found["n"], "ranks": ranks})}


def _numbers(value: Any) -> list[float]:
    return list(value) if isinstance(value, list | tuple) else [math.nan]


def best_thresholds(ranks: Sequence[float], labels: int) -> list[float | None]:
    """For each label, the threshold with the largest F1. A row gets a label if its probability reaches the threshold.

    A threshold lies in the middle between the logits of the last row below it and the first row above it. Of several
    best thresholds, the nearest to 0.5 is taken. A label that no row has gets None.
    """
    return [_best_threshold(*of) for of in _by_label(ranks, labels)]


def _best_threshold(z: Array, with_label: Array, without: Array) -> float | None:
    if not with_label.sum():
        return None
    right = np.cumsum(with_label[::-1])[::-1]  # rows at or above each logit
    found = right + np.cumsum(without[::-1])[::-1]
    f1 = 2 * right / (found + with_label.sum())
    middle = np.append(z[:1], (z[:-1] + z[1:]) / 2)
    best = np.flatnonzero(f1 >= f1.max() - 1e-12)
    least = middle[best[np.abs(middle[best]).argmin()]]
    return float(1 / (1 + math.exp(-least))) if abs(least) < 500 else float(least > 0)


def choose(ranks: Sequence[float] | None, classes: Sequence[str]) -> dict[str, dict[str, float]]:
    """The best thresholds as a value of the key ``threshold``; 0.5 for a label that no row has."""
    if ranks is None:
        return {}
    best = best_thresholds(ranks, len(classes))
    return {"threshold": {name: 0.5 if p is None else p for name, p in zip(classes, best, strict=True)}}


def row_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's binary cross-entropy, averaged over labels (b,), and a 1 for each row; from logits, targets (b, C)."""
    losses = F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").mean(1)
    return losses, torch.ones_like(losses, dtype=torch.int64)


def count(logits: Tensor, targets: Tensor, thresholds: Mapping[str, float]) -> dict[str, Any]:
    """The sums over rows of :class:`fedfm.tasks.multi_label.MultiLabel`, from logits and targets (n, C)."""
    least = torch.tensor([*thresholds.values()], dtype=torch.float64)
    found, right = logits.double() >= least.logit(), targets > 0
    return {
        "rows": len(targets),
        "right": int((found == right).all(1).sum()),
        "loss_of_rows": float(row_losses(logits.double(), targets)[0].sum()),
        "positives": right.sum(0).tolist(),
        "predicted_positives": found.sum(0).tolist(),
        "true_positives": (found & right).sum(0).tolist(),
        "ranks": rank_counts(logits.numpy(), targets.numpy()),
    }


def answer(logits: Tensor, thresholds: Mapping[str, float]) -> dict[str, Any]:
    """The predictions for rows, from their logits (n, C) and the threshold of each label."""
    shares = [dict(zip(thresholds, row, strict=True)) for row in logits.double().sigmoid().tolist()]
    return {
        "classes": list(thresholds),
        "thresholds": dict(thresholds),
        "labels": [[name for name, p in row.items() if p >= thresholds[name]] for row in shares],
        "probabilities": [{name: round(p, 6) for name, p in row.items()} for row in shares],
    }
