"""A clipping norm that follows a quantile of the clients' norms.

Andrew, Thakkar, McMahan, Ramaswamy. Differentially Private Learning with Adaptive Clipping. NeurIPS 2021,
arXiv:1905.03871, Algorithm 1 and Theorem 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_SHARE = 20  # the noise on the count has the standard deviation m / 20 for m clients, as in Section 3.1


@dataclass(frozen=True)
class AdaptiveClip:
    """Each client reports in one bit whether its update is within the norm C; C adapts to the share of such updates.

    A client that takes part adds its bit minus 1/2 to the count, and a client that does not take part adds 0. So the
    sensitivity is 1/2. The noise of the updates is larger than z C, so that updates and count together spend the
    epsilon of the noise multiplier z.

    Attributes:
        start: C of the first round.
        quantile: gamma, share of the clients whose updates are to be within C.
        learning_rate: eta_C of the geometric step.
    """

    start: float
    quantile: float
    learning_rate: float

    @staticmethod
    def count_noise(clients: float, z: float) -> float:
        """sigma_b: m / 20 as in the paper; at least z, so that the count costs at most 15 % more noise on updates."""
        return max(clients / _SHARE, z)

    @staticmethod
    def update_noise(z: float, sigma_b: float) -> float:
        """z_Delta = (z^-2 - (2 sigma_b)^-2)^(-1/2), Theorem 1; needs 2 sigma_b > z."""
        return 1 / math.sqrt(1 / z**2 - 1 / (2 * sigma_b) ** 2)

    def following(self, clip: float, share: float) -> float:
        """C of the next round: C exp(-eta_C (b - gamma)), where b is the noisy share of updates within C."""
        return clip * math.exp(-self.learning_rate * (share - self.quantile))
