"""Inference of which row of each pair is in a sum, by an attacker that knows everything else.

For every pair (x, x') a coin decided which of the two went into the sum. The attacker knows all pairs, all other rows
and the distribution of the noise, as differential privacy allows. No linear reading of the sum by another attacker
tells more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def readings(total: Array, known: Array, used: Array, unused: Array, sigma: float) -> Array:
    """Evidence by pair that ``used`` is in the released sum (positive) or ``unused`` (negative).

    With s = (x + x')/2 + b (x - x')/2 and b = +-1, the rest of the sum is D b + noise, with half the differences in D.
    The reading is the posterior mean of b under b ~ N(0, 1), which separates the pairs.

    Args:
        total: (d,) the released sum.
        known: (d,) sum of all other rows.
        used: (m, d) the rows in the sum; the attack is symmetric in ``used`` and ``unused``.
        unused: (m, d) their partners.
        sigma: standard deviation of the noise on each number of the sum.

    Returns:
        (m,).
    """
    halves = (used - unused) / 2  # (m, d)
    left = total - known - ((used + unused) / 2).sum(0)  # (d,)
    # A floor far below any noise keeps the system solvable if pairs depend on each other (m > d, equal rows).
    noise = max(sigma**2, 1e-9 * float((halves**2).sum(1).mean()) + 1e-300)
    gram = halves @ halves.T  # (m, m)
    gram[np.diag_indices_from(gram)] += noise
    return np.asarray(np.linalg.solve(gram, halves @ left))
