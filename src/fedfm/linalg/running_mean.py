"""Weighted means of parameter vectors as running sums."""

from __future__ import annotations

from collections.abc import Iterable

from fedfm.linalg.params import Params

_PIECE = 1 << 15  # entries that torch adds on one thread: rounding must not depend on the number of threads


class RunningMean:
    """Streaming weighted mean (sum_k a_k x_k) / (sum_k a_k), with one running sum in memory.

    Attributes:
        weight: sum_k a_k so far.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._sum: Params | None = None
        self._result: Params | None = None

    def add(self, weight: float, x: Params) -> None:
        """Add one term; float32 entries are summed in float32, in the order of the calls.

        Raises:
            RuntimeError: the mean was already computed.
        """
        if self._result is not None:
            raise RuntimeError("a term was added after the mean was computed")
        if self._sum is None:
            self._sum = x * weight
        else:
            x.check_like(self._sum.layout)
            for dtype, total in self._sum.flats.items():
                if dtype.is_floating_point:
                    term = x.flats[dtype]
                    for start in range(0, len(total), _PIECE):
                        piece = slice(start, start + _PIECE)
                        total[piece].add_(term[piece], alpha=weight)
        self.weight += weight

    def result(self) -> Params:
        """The mean; no term can be added afterwards. Entries that are not floating-point are those of the first term.

        Raises:
            ValueError: no term of positive weight was added.
        """
        if self._sum is None or not self.weight > 0:
            raise ValueError("a weighted mean needs at least one term of positive weight")
        if self._result is None:
            self._result = self._sum
            for dtype, total in self._sum.flats.items():
                if dtype.is_floating_point:
                    total.div_(self.weight)
        return self._result


def weighted_mean(terms: Iterable[tuple[float, Params]]) -> Params:
    """(sum_k a_k x_k) / (sum_k a_k), streaming."""
    mean = RunningMean()
    for weight, x in terms:
        mean.add(weight, x)
    return mean.result()
