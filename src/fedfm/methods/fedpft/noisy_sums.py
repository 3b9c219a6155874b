"""One noisy sum over the federation: the noise of one client, for any number of clients.

Every client gives the exact sums of its classes (:func:`client_sums`), the aggregator takes their mean, the server adds
noise once (:func:`federation_sum`). A record is at one client, so it changes the sum over the clients no more than its
client's: the sensitivity of a :class:`~fedfm.methods.fedpft.release_plan.Plan` holds unchanged. The mean of a class
over ``m`` clients has 1/m of the noise of one client's; the average of ``m`` noisy means has 1/sqrt(m).

==================  ====================================  ======================================
party               sees                                  is trusted
==================  ====================================  ======================================
plain aggregator    the exact sums of every client        with these sums
hiding aggregator   nothing (masked or encrypted)         -
server              the exact sum over all clients        to add the noise and keep no exact sum
clients, the model  the noisy sum                         -
==================  ====================================  ======================================

So (epsilon, delta) holds against those who see the result, not against the server. If the server must not have the
exact sum, each client releases by itself (:func:`fedfm.methods.fedpft.noisy_moments.release`).

The mean has to be unweighted: a weight by rows would reveal an exact count.
"""

from __future__ import annotations

import hashlib

import numpy as np

from fedfm.errors import E_NONFINITE, E_SHAPE, ClientFault, InputError
from fedfm.methods.fedpft.noisy_moments import Cell, noised, statistics
from fedfm.methods.fedpft.release_plan import Plan
from fedfm.privacy.noise import Array


def width(plan: Plan, d: int) -> int:
    """Numbers of a class in :func:`client_sums`: 1 + d (spherical), 1 + 2 d (diag), 1 + d + d (d + 1) / 2 (full)."""
    return 1 + d + plan.seconds(d)


def client_sums(x: Array, labels: np.ndarray[tuple[int], np.dtype[np.integer]], classes: int, plan: Plan) -> Array:
    """Client half: exact count, sum and second sum of every class, for an aggregator that shows only a mean.

    Send it in float64: float32 rounds a sum of 10^5 rows by 10^-2, which is not far enough below the sensitivity 1.

    Args:
        x: (n, d) unit rows.
        labels: (n,) from 0 to classes - 1.
        classes: C.
        plan: says which sums.

    Returns:
        (C, :func:`width`), zero for a class without rows.

    Raises:
        InputError: x has no unit rows, or a label is out of range.
    """
    labels = np.asarray(labels)
    if labels.shape != (len(x),) or (len(x) and not 0 <= labels.min() <= labels.max() < classes):
        raise InputError(f"labels have shape {labels.shape} for {len(x)} rows, or are not from 0 to {classes - 1}")
    rows = []
    for c in range(classes):
        cell = statistics(x[labels == c], plan)
        rows.append(np.concatenate([[cell.count], cell.total, [] if cell.second is None else cell.second]))
    return np.array(rows)


def federation_sum(mean: Array, clients: int, plan: Plan, d: int, key: bytes, purpose: str) -> dict[int, Cell]:
    """Server half: add noise once to the sum over the clients.

    Args:
        mean: (C, :func:`width`) unweighted mean over the clients of :func:`client_sums`.
        clients: how many clients are in the mean.
        plan: calibration ``analytic``.
        d: number of features.
        key: the server's secret, at least 16 bytes.
        purpose: names the release, e.g. ``"federation sum 0"``.

    Returns:
        Class -> cell, for :func:`fedfm.methods.fedpft.noisy_moments.to_gaussian`; without empty classes if counts are
        public.

    Raises:
        InputError: the calibration is not ``analytic``, the key is short, or ``clients`` is below 1.
        ClientFault: the mean has another shape, or is not finite.
    """
    if plan.calibration != "analytic" or plan.iterations > 1:
        raise InputError("a federation sum is one release with calibration 'analytic'; the plan has another")
    if clients < 1:
        raise InputError(f"clients is {clients}; a federation sum needs at least 1")
    if mean.ndim != 2 or mean.shape[1] != width(plan, d):
        raise ClientFault(E_SHAPE, f"the mean of the sums has shape {mean.shape}, not (classes, {width(plan, d)})")
    if not np.isfinite(mean).all():
        raise ClientFault(E_NONFINITE, "the mean of the sums has a NaN or infinite number")
    total = np.asarray(mean, dtype=np.float64) * clients
    digest = hashlib.sha256(np.ascontiguousarray(total, dtype="<f8").data).hexdigest()
    cells = {}
    for c, row in enumerate(total):
        count = float(np.rint(row[0]))  # the mean of whole numbers, times their number
        if plan.counts_public and count < 1:
            continue
        exact = Cell(count, row[1 : 1 + d], row[1 + d :] if plan.seconds(d) else None)
        cells[c] = noised(exact, plan, key, f"{purpose}\x1f{c}\x1f{digest}")
    return cells
