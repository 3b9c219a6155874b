"""A lower bound on epsilon from one run with many coins.

Steinke, Nasr, Jagielski: Privacy auditing with one (1) training run. NeurIPS 2023. arXiv:2305.08846, Theorem 5.2 and
Appendix D. Suppose that a mechanism is (epsilon, delta)-private in each coin. Then up to a term in delta, the number of
right answers among r guesses is stochastically at most the number of heads in r tosses of a coin with bias
e^epsilon/(1 + e^epsilon). The guesses may depend on each other in any way.

Here the coin of a pair of rows (x, x') decides which of the two is in a sum. The attacker knows all pairs, all other
rows and the distribution of the noise, as differential privacy assumes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedfm.audits.inference.rates import Array

_MOST = 64.0  # largest epsilon of the search
SHARES = (1.0, 0.5, 0.2, 0.05)  # each test uses this share of the guesses (the surest), and 1/4 of the error level


def readings(total: Array, known: Array, used: Array, unused: Array, sigma: float) -> Array:
    """Evidence for each pair: positive if ``used`` seems to be in the released sum, negative if ``unused`` does.

    The row of a pair that is in the sum is (x + x')/2 + b (x - x')/2 with b = +-1. After everything that is known
    is subtracted, the sum is D b + noise, where the columns of D are half the differences. The reading is the posterior
    mean of b under the prior b ~ N(0, 1). No other linear function of the sum gives more information on b.

    Args:
        total, known: (d,): the released sum, and the sum of all other rows.
        used, unused: (m, d): the rows in the sum, and their partners. Exchanging the rows of a pair changes only the
            sign of its evidence.
        sigma: standard deviation of the noise on each number of the sum.

    Returns:
        The evidence (m,).
    """
    halves = (used - unused) / 2  # (m, d)
    left = total - known - ((used + unused) / 2).sum(0)  # (d,)
    # A floor far below any noise keeps the system solvable if pairs depend on each other (m > d, equal rows).
    noise = max(sigma**2, 1e-9 * float((halves**2).sum(1).mean()) + 1e-300)
    gram = halves @ halves.T  # (m, m)
    gram[np.diag_indices_from(gram)] += noise
    return np.asarray(np.linalg.solve(gram, halves @ left))


def p_value(coins: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Probability of at least ``right`` right guesses, if the mechanism is (epsilon, delta)-private in each coin.

    Args:
        coins, guesses, right: numbers of coins, of guesses and of right guesses; none exceeds the one before.
        epsilon: at least 0. Infinity promises nothing, and gives probability 1.
        delta: from 0 to 1.
    """
    from scipy.stats import binom

    if not 0 <= right <= guesses <= coins:
        raise ValueError(f"{right} right of {guesses} guesses of {coins} coins")
    if epsilon == math.inf or not right:
        return 1.0
    bias = 1 / (1 + math.exp(-epsilon))
    beyond = float(binom.sf(right - 1, guesses, bias))
    # With probability delta, privacy may fail and turn i wrong guesses into right ones; the maximum is over all i.
    just_below = np.cumsum(binom.pmf(right - np.arange(1, right + 1), guesses, bias))
    return min(beyond + 2 * coins * delta * float((just_below / np.arange(1, right + 1)).max()), 1.0)


def epsilon_bound(readings: Sequence[float], delta: float, confidence: float = 0.95, steps: int = 1) -> float:
    """The largest epsilon that these readings refute at this confidence; 0 if they refute none.

    Args:
        readings: one for each coin. The guess is right if the reading is positive, and sure if its magnitude is large.
        delta: delta of the claim.
        steps: k, number of neighbouring steps between the two sides of a coin: 2 if the coin exchanges two rows and
            neighbours differ by an added or removed row. Then each coin is (2 epsilon, delta (1 + e^epsilon))-private.
    """
    x = np.asarray(readings, dtype=np.float64)
    if not len(x):
        return 0.0
    order = np.argsort(-np.abs(x), kind="stable")
    best = 0.0
    for guesses in sorted({max(1, round(share * len(x))) for share in SHARES}):
        right = int((x[order[:guesses]] > 0).sum())  # a reading of 0 counts as wrong, which is the safe side
        low, high = 0.0, _MOST
        level = (1 - confidence) / len(SHARES)
        if _refutes(len(x), guesses, right, low, delta, steps, level):
            for _ in range(40):
                middle = (low + high) / 2
                if _refutes(len(x), guesses, right, middle, delta, steps, level):
                    low = middle
                else:
                    high = middle
        best = max(best, low)
    return best


def _refutes(coins: int, guesses: int, right: int, epsilon: float, delta: float, steps: int, level: float) -> bool:
    return p_value(coins, guesses, right, *of_steps(epsilon, delta, steps)) < level


def of_steps(epsilon: float, delta: float, steps: int) -> tuple[float, float]:
    """Epsilon and delta between two data sets that are ``steps`` neighbouring steps apart.

    Example:
        >>> of_steps(0.0, 1e-5, 2)
        (0.0, 2e-05)
    """
    return steps * epsilon, min(delta * sum(math.exp(min(i * epsilon, 700.0)) for i in range(steps)), 1.0)


def largest_auc(epsilon: float, delta: float) -> float:
    """Largest AUC that a test of one row's presence can have under (epsilon, delta)-privacy.

    It is the area above the trade-off curve max(0, 1 - delta - e^eps a, e^-eps (1 - delta - a)), where a is the rate of
    false alarms.

    Example:
        >>> round(largest_auc(1.0, 0.0), 4), largest_auc(0.0, 0.0)
        (0.7311, 0.5)
    """
    return 1 - (1 - delta) ** 2 / (1 + math.exp(min(epsilon, 700.0)))
