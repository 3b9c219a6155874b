"""Multi-Krum: the mean of the updates with the best Krum scores.

Blanchard, El Mhamdi, Guerraoui, Stainer. Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent.
NIPS 2017. arXiv:1703.02757, Section 5. The clients' weights are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedfm.aggregation._robust import combination, shares, squared_distances
from fedfm.aggregation.krum import Krum, scores
from fedfm.core.fields import setting
from fedfm.linalg.params import Params


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The uniform mean of the ``keep`` updates with the smallest scores."""

    keep: int = setting(0, "number of updates that are averaged; 0: all except f", ge=0)

    def combine(self, weights: Sequence[float], x: Sequence[Params]) -> Params:
        order = scores(squared_distances(x), self.byzantine).argsort(stable=True).tolist()
        kept = sorted(order[: self.keep or len(x) - self.byzantine])
        return combination([x[i] for i in kept], shares([1.0] * len(kept)))

    def least(self) -> int:
        return max(super().least(), self.keep + self.byzantine)
