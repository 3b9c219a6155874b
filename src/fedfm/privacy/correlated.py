"""Noise that is correlated between rounds, so that a part of it cancels in the model, which is the sum of all rounds.

The sums X (T, P) of T rounds are released as X + C^-1 Z with independent normal Z: a post-processing of C X + Z, which
is private also if later sums depend on earlier releases (Denisov, McMahan, Rush, Smith, Guha Thakurta. Improved
Differential Privacy for SGD via Optimal Private Linear Operators on Adaptive Streams. NeurIPS 2022, arXiv:2202.08312).
After round s the model has the noise (A C^-1 Z)_s, where A is the lower triangular matrix of ones (Kairouz, McMahan,
Song, Thakkar, Thakurta, Xu. Practical and Private (Deep) Learning without Sampling or Shuffling. ICML 2021,
arXiv:2103.00039).

C is lower triangular and Toeplitz, with the first p coefficients of the square root of A, c_i = binom(2 i, i) / 4^i
(Fichtenberger, Henzinger, Upadhyay. Constant Matters. ICML 2023, arXiv:2202.11205; banded: Kalinin, Lampert. Banded
Square Root Matrix Factorization for Differentially Private Model Training. NeurIPS 2024, arXiv:2405.13763).

*Sensitivity*. A client takes part every b rounds. Its vectors u_t of norm at most 1 change C X by sum_t C_t u_t^T,
where C_t is a column of C. All entries of C are at least 0. So the Frobenius norm of the change is largest if all u_t
are equal and the client skips no round. Then it is the norm of the sum of every b-th column. With p <= b bands these
columns are orthogonal (Choquette-Choo et al. (Amplified) Banded Matrix Factorization. NeurIPS 2023, arXiv:2306.08153).

*Quality*. The noise of the last model is at most 4 % above that of the best Toeplitz matrix that a numerical search
found for (T, b) = (12, 3), (24, 6), (30, 5) and (16, 16).

*No gain for b = 1*. Let 1_s have ones for the first s rounds, else zeros. Then s = (1_s^T C^-1) (C 1_s) is at most the
deviation of model s times the sensitivity, for every C. With independent noise and s = T, equality holds.
So if all clients are in every round, independent noise is the best for the last model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_EVERY = 64  # all numbers of bands up to this one are tried, then a geometric grid with ratio 1.1


@dataclass(frozen=True)
class Strategy:
    """A banded Toeplitz matrix C for a run.

    Attributes:
        coefficients: c_0 = 1, ..., c_{p-1}.
        rounds: T.
        period: b; a client takes part in rounds i, i + b, i + 2 b, ...
    """

    coefficients: tuple[float, ...]
    rounds: int
    period: int

    def sensitivity(self, rounds: int | None = None) -> float:
        """Largest norm of a client's part in the first ``rounds`` rows (default: all) of C X, for vectors of norm 1."""
        n = self.rounds if rounds is None else rounds
        return max((float(np.linalg.norm(self._columns(n, i))) for i in range(min(self.period, n))), default=0.0)

    def of_one_answer(self) -> float:
        """A bound a such that any j answers of a client have at most the sensitivity a j^(1/2).

        a^2 is the largest sum over t of <C_s, C_t>, where s and t are rounds of the same client.
        """
        c, n = np.array(self.coefficients), self.rounds
        most = 0.0
        for i in range(min(self.period, n)):
            total = self._columns(n, i)
            most = max(most, *(float(c[: n - at] @ total[at : at + len(c)]) for at in range(i, n, self.period)))
        return math.sqrt(most)

    def _columns(self, n: int, first: int) -> Array:
        """Sum of the columns of the rounds first, first + b, ... of the upper left (n, n) block: (n,)."""
        taken = np.zeros(n)
        taken[first :: self.period] = 1.0
        return np.convolve(taken, self.coefficients)[:n]

    def inverse(self) -> Array:
        """Coefficients of the Toeplitz matrix C^-1: (T,)."""
        return _inverse(self.coefficients, self.rounds)

    def deviations(self) -> Array:
        """Standard deviation of an entry of each model, (T,), if Z has the deviation 1."""
        return np.asarray(np.sqrt(np.cumsum(np.cumsum(self.inverse()) ** 2)))

    def last(self) -> float:
        """Standard deviation of the last model at a sensitivity of 1; no earlier model has a larger deviation."""
        return float(self.deviations()[-1]) * self.sensitivity()


@lru_cache(maxsize=64)
def strategy(rounds: int, period: int) -> Strategy:
    """The strategy whose number of bands gives the last model the least noise at equal privacy.

    Example:
        >>> len(strategy(20, 1).coefficients)
        1
    """
    root = [1.0]
    for i in range(1, rounds):
        root.append(root[-1] * (2 * i - 1) / (2 * i))
    grid = (round(_EVERY * 1.1**i) for i in range(200))
    bands = {*range(1, min(rounds, _EVERY) + 1), *(p for p in grid if p < rounds), rounds}
    found = [Strategy(tuple(root[:p]), rounds, period) for p in sorted(bands)]
    return min(found, key=Strategy.last)


def _inverse(coefficients: tuple[float, ...], n: int) -> Array:
    from scipy.signal import lfilter

    one = np.zeros(n)
    one[0] = 1.0
    return np.asarray(lfilter([1.0], coefficients, one))
