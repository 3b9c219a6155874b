"""Scores of rows with several labels, from sums over rows; the sums of several clients can be added.

AUROC and average precision need the order of the rows by their logits. The sum ``ranks`` stores this order as counts:
for each label and each logit, the number of rows with the label and the number of rows without it.

In one process the logits are exact (float32), and so are the scores. A silo sends its counts in at most 34 bins per
label: the server chooses the weights, so exact logits would disclose a feature of each row.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.errors import E_FIELD, ClientFault
from fedfm.tasks._sums import entries, mean_of_known

Array = np.ndarray
Ranks = list[int]  # triples (place, rows with the label, rows without it); the places, of label and logit, ascend

_KEYS = 1 << 32  # number of float32 values: a label has the places label * _KEYS to (label + 1) * _KEYS - 1
_EXACT = 1 << 16  # for up to this number of rows, logits are exact; for more rows, they are rounded to keep counts few
_FINE, _STEPS = 0.01, 1600  # for more rows: logit z is in bin floor(1600 asinh(z / 0.01)), 0.06 % of z wide
_TOLD, _TAIL = 24, 4  # largest numbers of bins: for the middle 90 % of a label's rows; for the 5 % on either side
_DIGITS = 64  # largest number of bins from 0 to the largest logit of the middle 90 %


def rank_counts(logits: Array, targets: Array) -> Ranks:
    """The counts of rows for each label and logit, from logits and targets (n, C)."""
    z = logits if len(logits) <= _EXACT else _round_logits(logits)
    place = np.arange(logits.shape[1]) * _KEYS + _keys(z)  # (n, C)
    return _count_by_bin(place.ravel(), (targets > 0).ravel().astype(np.int64), (targets <= 0).ravel().astype(np.int64))


def _round_logits(z: Array) -> Array:
    """Replace each logit by the middle of its bin; zero is the edge between two bins."""
    bins = np.floor(np.arcsinh(z.astype(np.float64) / _FINE) * _STEPS)
    middles: Array = _FINE * np.sinh((bins + 0.5) / _STEPS)
    return middles


def coarse_ranks(ranks: Sequence[float], labels: int) -> Ranks:
    """The counts that a silo sends: at most 34 bins per label; the rows of a bin are spread evenly over the bin.

    The width of a label's bins is a power of two: 1/24 to 1/12 of the range of the middle 90 % of its rows, but at
    least 1/64 of the largest absolute logit of these rows. The other rows are in four more bins on either side.
    """
    triples = np.zeros((0, 3), np.int64)
    for c, (logits, with_label, without) in enumerate(_by_label(ranks, labels)):
        if not len(logits):
            continue
        share = np.cumsum(with_label + without) / (with_label + without).sum()
        low, high = logits[np.searchsorted(share, (0.05, 0.95))]
        size = max((high - low) / _TOLD, max(abs(low), abs(high)) / _DIGITS, 1e-30)
        width = 2.0 ** math.ceil(math.log2(size))
        bins = np.floor(logits / width).clip(low // width - _TAIL, high // width + _TAIL)
        parts = [_spread(bins, counts, width) for counts in (with_label, without)]
        place = c * _KEYS + _keys(np.concatenate(parts))
        has = np.arange(len(place)) < len(parts[0])
        triples = np.concatenate([triples, np.stack([place, has, ~has], axis=1).astype(np.int64)])
    return _count_by_bin(*triples.T)


def _spread(bins: Array, counts: Array, width: float) -> Array:
    """One logit for each row: the logits of a bin lie at equal distances in the bin."""
    each, of = np.unique(bins, return_inverse=True)
    rows = np.bincount(of, counts, len(each)).astype(np.int64)
    nth = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
    return (np.repeat(each, rows) + (nth + 0.5) / np.repeat(rows, rows)) * width


def _keys(z: Array) -> Array:
    """Cast the values to float32, and return whole numbers from 0 to 2^32 - 1 in the same order."""
    bits = (np.nan_to_num(z).astype(np.float32) + np.float32(0)).view(np.int32).astype(np.int64)  # -0 becomes 0
    keys: Array = np.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits) + (_KEYS >> 1)
    return keys


def _values(keys: Array) -> Array:
    """The inverse of :func:`_keys`, as float64."""
    bits = keys - (_KEYS >> 1)
    found = np.where(bits < 0, (-1 - bits) | -(1 << 31), bits).astype(np.int32).view(np.float32)
    return np.nan_to_num(found.astype(np.float64))


def check_counts(reply: Mapping[str, Any], labels: int) -> None:
    """Check that the counts by label and bin that a client sent are possible for its rows.

    Raises:
        ClientFault: with E_FIELD if they are not.
    """
    n, names = reply.get("n", 0), ("positives", "predicted_positives", "true_positives")
    counts = [reply.get(name) for name in names]
    if any(of is not None and not _whole(of) for of in (*counts, reply.get("ranks"))):
        raise ClientFault(E_FIELD, "counts by label: expected whole numbers that are not negative")
    positives, found, right = counts
    for name, of in zip(names[:2], (positives, found), strict=True):
        if of is not None and max(of, default=0) > n:
            raise ClientFault(E_FIELD, f"{name}: {max(of):g} of {n:g} rows")
        if of is not None and right is not None and any(map(operator.gt, right, of)):
            raise ClientFault(E_FIELD, f"true_positives: more than {name}")
    if (ranks := reply.get("ranks")) is None:
        return
    if (
        len(ranks) % 3
        or max(ranks[::3], default=0) >= _KEYS * labels
        or any(map(operator.ge, ranks[:-3:3], ranks[3::3]))
    ):
        raise ClientFault(E_FIELD, "ranks: expected triples of ascending bins of the labels")
    rows = [(int(a.sum()), int(b.sum())) for _, a, b in _by_label(ranks, labels)]
    expected = [(int(c), int(n - c)) for c in positives or (a for a, _ in rows)]
    if rows != expected:
        raise ClientFault(E_FIELD, "ranks: the counts of a label do not add up to its rows")


def _whole(values: Sequence[float | None]) -> bool:
    """Whether all are whole numbers that are not negative, and exact as floats."""
    return all(value is not None and 0 <= value <= 2**53 and value == int(value) for value in values)


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
    ends = np.searchsorted(place, np.arange(1, labels) * _KEYS)  # the places ascend
    parts = (np.split(of, ends) for of in (_values(place % _KEYS), with_label, without))
    return [*zip(*parts, strict=True)]


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


def scores(sums: Mapping[str, Any]) -> dict[str, Any]:
    """All scores that follow from the sums of :class:`fedfm.tasks.multi_label.MultiLabel`; {} without rows.

    An undefined score is None. An unknown sum is NaN, or a list with NaN.
    """
    if sums["rows"] == 0:
        return {}
    labelled, found, right = (entries(sums[key]) for key in ("positives", "predicted_positives", "true_positives"))
    known = all(map(math.isfinite, (*labelled, *found, *right)))
    f1 = f1_by_label(labelled, found, right) if known else []
    total = sum(labelled) + sum(found)
    ranks = entries(sums["ranks"])
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


def coarse_scores(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """A silo's scores and sums with the counts of :func:`coarse_ranks`; the scores follow from these sums."""
    if not reply.get("ranks") or not reply.get("positives"):
        return reply
    ranks = coarse_ranks(reply["ranks"], len(reply["positives"]))
    return {**reply, "ranks": ranks, **scores({**reply, "rows": reply["n"], "ranks": ranks})}


def best_thresholds(ranks: Sequence[float], labels: int) -> list[float | None]:
    """For each label, the threshold with the largest F1. A row gets a label if its probability reaches the threshold.

    The logit of a threshold is the smallest logit of a row or the middle between two neighbouring logits. Of several
    best thresholds, the one nearest to 0.5 is taken. A label that no row has gets None.
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
    """The best thresholds as a value of the key ``threshold``; a label that no row has gets 0.5."""
    if ranks is None:
        return {}
    best = best_thresholds(ranks, len(classes))
    return {"threshold": {name: 0.5 if p is None else p for name, p in zip(classes, best, strict=True)}}


def check_thresholds(chosen: Mapping[str, Mapping[str, float]], classes: Sequence[str]) -> dict[str, float]:
    """The thresholds that a server chose, in the order of ``classes``.

    Raises:
        ClientFault: with E_FIELD if they are not one threshold from 0 to 1 for each label.
    """
    found = chosen.get("threshold", {})
    if set(chosen) != {"threshold"} or set(found) != set(classes) or not all(0 <= p <= 1 for p in found.values()):
        raise ClientFault(E_FIELD, "chosen: expected a threshold from 0 to 1 for each label, and nothing else")
    return {name: found[name] for name in classes}


def row_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's mean binary cross-entropy over labels (b,), and counts of 1 (b,), from logits and targets (b, C)."""
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
