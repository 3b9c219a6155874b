"""One noisy sum over the federation. For any number of clients, it has only the noise of one client.

Every client sends the exact sums of its classes, the aggregator averages them, and the server adds noise once. A record
belongs to one client, so it changes the sum over all clients no more than it changes its client's sum. So the
sensitivity of a :class:`~fedfm.methods.fedpft.release_plan.Plan` is unchanged, and a class's mean over m clients has
1/m of one client's noise. The mean is unweighted, since a weight by rows would reveal an exact count.

The clients must trust the server to add the noise. With a plain aggregator they also show it their exact sums. So
(epsilon, delta) protects only against those who see the result. Without this trust, leave ``pooled`` false: then
each client adds noise itself.
"""

from __future__ import annotations

import numpy as np

from fedfm.errors import InputError
from fedfm.methods.fedpft.noisy_moments import Cell, add_noise, statistics
from fedfm.methods.fedpft.release_plan import Plan
from fedfm.privacy.noise import Array, digest


def width(plan: Plan, d: int) -> int:
    """Number of values per class in :func:`client_sums`: spherical 1 + d, diag 1 + 2 d, full 1 + d + d (d + 1) / 2."""
    return 1 + d + plan.seconds(d)


def client_sums(x: Array, labels: np.ndarray[tuple[int], np.dtype[np.integer]], classes: int, plan: Plan) -> Array:
    """Client half: exact count, sum and second moments of every class, for an aggregator that discloses only a mean.

    Send them in float64: float32 rounds a sum of 10^5 rows by 10^-2, which is not far enough below the sensitivity 1.

    Args:
        x: (n, d) unit rows.
        labels: (n,) from 0 to C - 1, C the number of classes.

    Returns:
        (C, :func:`width`), zero for a class without rows.

    Raises:
        InputError: a row of x does not have norm 1.
    """
    rows = []
    for c in range(classes):
        cell = statistics(x[labels == c], plan)
        rows.append(np.concatenate([[cell.count], cell.total, [] if cell.second is None else cell.second]))
    return np.array(rows)


def federation_sum(mean: Array, clients: int, plan: Plan, d: int, key: bytes, purpose: str) -> dict[int, Cell]:
    """Server half: add noise once to the sum over the clients.

    Args:
        mean: (C, :func:`width`), the unweighted mean of the results of :func:`client_sums` from all ``clients``.
        key: the server's secret, at least 16 bytes.
        purpose: text that names the release, e.g. ``"federation sum 0"``.

    Returns:
        The cell of each class, for :func:`fedfm.methods.fedpft.noisy_moments.to_gaussian`; empty classes are missing
        if counts are public.

    Raises:
        InputError: the calibration is not ``analytic``, or the key is short.
    """
    if plan.calibration != "analytic":
        raise InputError("a federation sum needs calibration 'analytic', but the plan has another")
    total = np.asarray(mean, dtype=np.float64) * clients
    whole = digest(total)
    cells = {}
    for c, row in enumerate(total):
        count = float(np.rint(row[0]))  # the sum of the clients' counts, which are integers
        if plan.counts_public and count < 1:
            continue
        exact = Cell(count, row[1 : 1 + d], row[1 + d :] if plan.seconds(d) else None)
        cells[c] = add_noise(exact, plan, key, f"{purpose}\x1f{c}\x1f{whole}")
    return cells
