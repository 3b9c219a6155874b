"""Shapley values and leave-one-out values of clients, from a function that values sets of clients.

The value of a set is an array: one entry for each test row, e.g. whether the model of the set is right, or one entry
for a figure of all rows. Shapley values are linear in the value, so each row has its own, and their spread over rows
gives an interval. Shapley: A Value for n-Person Games. Contributions to the Theory of Games II, 1953.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fedfm import seeds

Array = NDArray[np.float64]
Coalition = frozenset[str]
Worth = Callable[[Coalition], Array]
Z = 1.959964  # normal quantile of 95 %


@dataclass(frozen=True)
class Values:
    """What each client contributed.

    Attributes:
        values: for each client, its Shapley value of each entry.
        variance: for each client, the variance of the mean value that sampling of permutations adds; 0 if exact.
        total: value of all clients minus value of none.
    """

    values: dict[str, Array]
    variance: dict[str, float]
    total: float

    def interval(self, client: str) -> tuple[float, float | None, float | None]:
        """The client's value and its 95 % interval over test rows and permutations.

        One figure of all rows has no spread over rows: without sampling its interval is unknown (None), and with
        sampling it covers the permutations only.
        """
        rows = self.values[client]
        if len(rows) == 1 and not self.variance[client]:
            return float(rows.mean()), None, None
        variance = self.variance[client] + (float(rows.var(ddof=1)) / len(rows) if len(rows) > 1 else 0.0)
        middle, margin = float(rows.mean()), Z * math.sqrt(variance)
        return middle, middle - margin, middle + margin

    def __add__(self, other: Values) -> Values:
        """The values of two parts of training, e.g. of two rounds; a client may be in one of them only."""
        values, variance = dict(self.values), dict(self.variance)
        for client, rows in other.values.items():
            values[client] = values[client] + rows if client in values else rows
            variance[client] = variance.get(client, 0.0) + other.variance[client]
        return Values(values, variance, self.total + other.total)


def shapley_over_sets(clients: Sequence[str], worth: Worth) -> Values:
    """Shapley values over all 2^K sets of K clients."""
    k, values = len(clients), dict[str, Array]()
    whole, none = worth(frozenset(clients)), worth(frozenset())
    for size in range(k + 1):
        inside = 1 / (size * math.comb(k, size)) if size else 0.0
        outside = 1 / ((k - size) * math.comb(k, size)) if size < k else 0.0
        for chosen in combinations(clients, size):
            found = worth(frozenset(chosen))
            for client in clients:
                share = inside * found if client in chosen else -outside * found
                values[client] = values[client] + share if client in values else share
    return Values(values, dict.fromkeys(clients, 0.0), float((whole - none).mean()))


def shapley_by_orders(clients: Sequence[str], worth: Worth, evaluations: int, seed: int) -> Values:
    """Shapley values over random orders of the clients, which join one after the other.

    Orders are stratified by position: each random order is also used in all its rotations, so every client is at every
    position equally often, and each order is used backwards, too. The gains along an order add up to the total, so
    the values do as well.

    Args:
        evaluations: about how many sets are valued; at least two orders are used.
    """
    k, gains = len(clients), {client: list[Array]() for client in clients}
    pairs = max(2, evaluations // max(2 * (k - 1), 1))
    for order in _orders(clients, pairs, seed):
        both = [_gains(order, worth), _gains(order[::-1], worth)]
        for client in clients:
            gains[client].append((both[0][client] + both[1][client]) / 2)
    values = {client: np.mean(found, axis=0) for client, found in gains.items()}
    spread = {client: float(np.var([g.mean() for g in found], ddof=1)) / pairs for client, found in gains.items()}
    return Values(values, spread, float((worth(frozenset(clients)) - worth(frozenset())).mean()))


def _orders(clients: Sequence[str], count: int, seed: int) -> Iterator[list[str]]:
    k = len(clients)
    for j in range(count):
        if j % k == 0:
            base = [clients[i] for i in seeds.generator(seed, "worth", "order", j).permutation(k)]
        yield base[j % k :] + base[: j % k]


def _gains(order: Sequence[str], worth: Worth) -> dict[str, Array]:
    found, before = dict[str, Array](), worth(frozenset())
    for i, client in enumerate(order):
        after = worth(frozenset(order[: i + 1]))
        found[client], before = after - before, after
    return found
