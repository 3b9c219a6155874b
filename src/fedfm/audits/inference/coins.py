"""Which row of each pair was used: an attacker that knows everything about a sum but these coins.

For every pair (x, x') a coin decided which of the two went in. The attacker knows all pairs, all other rows and the
law of the noise, which is what differential privacy allows it to know; so what this one cannot tell nobody can, as far
as a linear reading of the sum goes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def readings(total: Array, known: Array, used: Array, unused: Array, sigma: float) -> Array:
    """How strongly the released sum says that ``used`` went in (positive) or ``unused`` (negative), by pair.

    With s = (x + x')/2 + b (x - x')/2 and b = +-1, what is left of the sum is D b + noise, D the halved differences;
    the reading is the posterior mean of b under b ~ N(0, 1), so that pairs do not disturb each other.

    Args:
        total: (d,) what was released.
        known: (d,) sum of all rows but those of the pairs.
        used: (m, d) those that went in; the attacker does not know that it is these, the order carries no weight.
        unused: (m, d) those that did not.
        sigma: standard deviation of the noise on each number of the sum.

    Returns:
        (m,).
    """
    halves = (used - unused) / 2  # (m, d)
    left = total - known - ((used + unused) / 2).sum(0)  # (d,)
    # A floor far below any noise keeps the system solvable where pairs depend on each other (m > d, equal rows).
    noise = max(sigma**2, 1e-9 * float((halves**2).sum(1).mean()) + 1e-300)
    gram = halves @ halves.T  # (m, m)
    gram[np.diag_indices_from(gram)] += noise
    out: Array = np.linalg.solve(gram, halves @ left)
    return out
