"""FedPFT's private release of one class at one client, and the Gaussian that the server computes from this release.

Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang: Parametric Feature Transfer: One-shot Federated Learning with
Foundation Models. 2024. arXiv:2402.01862, Theorem 4.1 and Appendix E. Noise and sensitivities are exact here, unlike
the printed ones. Each class has one mixture component.

The client adds the noise, and others see only a :class:`Cell`, the noisy sums of one class. A row affects one cell
(two if its label may change), so all cells of a client together cost :attr:`Plan.epsilon_spent`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedfm.errors import E_NONFINITE, E_SHAPE, E_WEIGHT, ClientFault, InputError
from fedfm.methods.fedpft.release_plan import Plan
from fedfm.privacy import noise
from fedfm.privacy.noise import Array

_LEAST, _FLOOR = 1e-4, 1e-6  # smallest mean variance; smallest eigenvalue, as a fraction of the mean variance


@dataclass(frozen=True)
class Cell:
    """The released statistics of one class, at one client or over the federation.

    Attributes:
        count: the noisy number n~ of rows; exact only if the relation makes counts public.
        total: noisy sum of the rows, (d,).
        second: None if spherical; the noisy sum of squares (d,) if diag; if full, the lower triangle (d (d + 1) / 2,),
            row by row, of the noisy sum of x x^T.
    """

    count: float
    total: Array
    second: Array | None = None


def statistics(x: Array, plan: Plan) -> Cell:
    """Exact sums of one class's n >= 0 unit rows x (n, d), as a cell without noise. Do not send this cell.

    Raises:
        InputError: x is not a matrix of unit rows.
    """
    if x.ndim != 2 or not x.shape[1]:
        raise InputError(f"features have shape {x.shape}; they must be (rows, features)")
    norms = np.linalg.norm(x, axis=1)
    if not np.all(np.abs(norms - 1) < 1e-6):
        raise InputError("a row's norm is not 1, but the noise is for rows of norm 1; pass unit_rows(x)")
    x = np.asarray(x, dtype=np.float64) / norms[:, None]
    second = None
    if plan.covariance == "diag":
        second = np.einsum("ij,ij->j", x, x)
    elif plan.covariance == "full":
        second = (x.T @ x)[np.tril_indices(x.shape[1])]
    return Cell(float(len(x)), x.sum(axis=0), second)


def release(x: Array, plan: Plan, key: bytes, purpose: str, *, client_rows: int = 0) -> Cell:
    """Client half: the noisy statistics of one class.

    The noise depends on key, purpose, plan, rows, and the sums to which it is added. A repeated release has the same
    bits and reveals nothing new. Other rows or another plan give other noise, so the difference of two releases always
    has noise. Each release of other rows spends privacy again.

    Args:
        x: (n, d) unit rows of the class. Under ``add_remove`` and ``replace_any``, release each class, also with n = 0,
            since a missing cell would reveal that the class is empty.
        key: the client's secret, at least 16 bytes.
        purpose: text that names client and class, e.g. ``"c3/moments/7"``; every cell needs a purpose of its own.
        client_rows: the client's number of rows in all classes; only for calibration ``paper_client``.

    Raises:
        InputError: the rows of x do not have norm 1, n is 0 under ``replace``, or the key is short.

    Example:
        >>> plan = Plan("add_remove", "spherical", epsilon=1.0, delta=1e-5)
        >>> release(np.eye(4), plan, bytes(32), "c3/moments/7").total.shape
        (4,)
    """
    purpose = f"{purpose}\x1f{client_rows}\x1f{noise.digest(np.asarray(x, np.float64))}"
    return add_noise(statistics(x, plan), plan, key, purpose, client_rows=client_rows)


def add_noise(exact: Cell, plan: Plan, key: bytes, purpose: str, *, client_rows: int = 0) -> Cell:
    """Add normal noise to the sums and, unless counts are public, to the count.

    Its standard deviation is the plan's sigma for each sum, sigma/sqrt(2) for sums of x x^T off the diagonal, and
    sigma/a for the count.
    """
    d, sigma = len(exact.total), plan.sum_sigma(exact.count, client_rows=client_rows)
    count, second = np.array([exact.count]), exact.second
    # One hash of all parts, since no part is released alone.
    whole = noise.digest(count, exact.total, *(() if second is None else (second,)))
    purpose = f"{purpose}\x1f{plan}\x1f{whole}"
    if second is not None:
        scale = sigma * noise.packed_scale(d) if plan.covariance == "full" else sigma
        second = noise.cover(key, f"{purpose}\x1fsecond", second, scale)
    if not plan.counts_public:
        count = noise.cover(key, f"{purpose}\x1fcount", count, sigma / plan.a)
    return Cell(float(count[0]), noise.cover(key, f"{purpose}\x1ftotal", exact.total, sigma), second)


def to_gaussian(cell: Cell, plan: Plan, d: int, *, client_rows: int = 0) -> tuple[float, Array, Array | float] | None:
    """Server half: the normal distribution that a class's cell describes. As post-processing, this costs no privacy.

    Returns:
        (n~, mean (d,), variance: a float (spherical), (d,) (diag) or (d, d) positive definite (full)); None if the
        count is not above its noise, n~ <= 2 sigma/a.

    Raises:
        ClientFault: the cell has another shape or is not finite, or it has no rows although counts are public.
    """
    _check(cell, plan, d)
    if cell.count <= 2 * plan.count_sigma:
        return None
    return normal_of(cell, plan.sum_sigma(cell.count, client_rows=client_rows))


def normal_of(cell: Cell, sigma: float) -> tuple[float, Array, Array | float]:
    """As :func:`to_gaussian`, if the noise on the sums has standard deviation ``sigma``; the count must be above 0."""
    n, d = cell.count, len(cell.total)
    mean = cell.total / n
    inflated = (sigma / n) ** 2  # E mean~ mean~^T = mean mean^T + inflated I
    # For unit rows |x|^2 = 1, so the trace of the covariance, E |x|^2 - |mean|^2, is 1 - |mean|^2.
    level = float(np.clip((1 - mean @ mean + d * inflated) / d, _LEAST, 1 / d))
    if cell.second is None:
        return n, mean, level
    floor = _FLOOR * level
    if cell.second.shape == (d,):
        variance = np.maximum(cell.second / n - mean**2 + inflated, floor)
        return n, mean, variance * (d * level / variance.sum())
    moment = noise.unpack(cell.second / n, d)
    covariance = noise.project(moment - np.outer(mean, mean) + inflated * np.eye(d), floor)
    return n, mean, covariance * (d * level / float(np.trace(covariance)))


def _check(cell: Cell, plan: Plan, d: int) -> None:
    """Refuse a cell that a client cannot have released under this plan."""
    right = (plan.seconds(d),) if plan.seconds(d) else None
    second = None if cell.second is None else cell.second.shape
    if cell.total.shape != (d,) or second != right:
        raise ClientFault(
            E_SHAPE,
            f"a cell has shapes {cell.total.shape} and {second}; covariance {plan.covariance!r} in {d} features needs "
            f"{(d,)} and {right}",
        )
    parts = [cell.total] if cell.second is None else [cell.total, cell.second]
    if not (math.isfinite(cell.count) and all(np.isfinite(part).all() for part in parts)):
        raise ClientFault(E_NONFINITE, "a cell has a NaN or infinite number")
    if plan.counts_public and (cell.count < 1 or cell.count != int(cell.count)):
        raise ClientFault(E_WEIGHT, f"a cell has {cell.count:g} rows; a public count is a whole number of at least 1")
