"""Compute labels from the mean loss of predictions that the attacker chooses.

The mean cross-entropy -1/n sum_i log p_i[y_i] is linear in log p. If the attacker chooses -log p_i[c] = c C^i, the sum
is a number in base C whose digits are the labels. One loss with b bits gives b / log2(C) labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fedfm.audits.inference.rates import Array

Loss = Callable[[Array], float]  # -log p (n, C) -> mean loss


def labels_by_loss(loss: Loss, count: int, classes: int, bits: int = 20) -> tuple[Array, int]:
    """Return the labels (n,), and the number of queries that the attack took.

    Args:
        loss: answers one query. It takes -log p (n, C) and returns the mean of the entries that the labels select.
        count: n, number of labels.
        classes: C >= 2, number of classes.
        bits: number of bits of the sum that one answer discloses.

    Example:
        >>> y = np.array([3, 0, 9, 9, 1])
        >>> found, queries = labels_by_loss(lambda chosen: chosen[range(5), y].mean(), 5, 10)
        >>> found.tolist(), queries
        ([3, 0, 9, 9, 1], 1)
    """
    at_once = max(int(bits / math.log2(classes) + 1e-9), 1)
    labels, queries = np.zeros(count, np.int64), 0
    for start in range(0, count, at_once):
        group = range(start, min(start + at_once, count))
        chosen = np.zeros((count, classes))
        for digit, i in enumerate(group):
            chosen[i] = np.arange(classes) * float(classes) ** digit
        rest, queries = round(loss(chosen) * count), queries + 1
        for i in group:
            rest, labels[i] = divmod(rest, classes)
    return labels, queries
