"""DP-EM: several mixture components of one class under differential privacy, every iteration accounted.

A release of FedPFT (Beitollahi et al. 2024, Section 4.1) with K > 1; the paper has no privacy for it. One iteration
releases a r_k, r_k x and, if asked, r_k x x^T, summed over the rows, for every component k. The responsibilities r of
a row are at least 0 and sum to 1, so |r| <= 1, and for any mixture a row changes these sums no more than those of one
component (:attr:`Plan.sum_sensitivity`). J iterations of a Gaussian mechanism, each chosen after the last, equal one
with noise sigma/sqrt(J): exact, no bound. The start does not depend on the data.

The client adds the noise and sends the last mixture. At small epsilon one component is better: J = 5 iterations cost
sqrt(5) times the noise, K components have 1/K of the rows each.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from fedfm.errors import InputError
from fedfm.methods.fedpft.noisy_moments import Cell, noised, normal_of, statistics
from fedfm.methods.fedpft.release_plan import Plan
from fedfm.privacy.noise import Array, digest
from fedfm.seeds import generator


@dataclass(frozen=True)
class NoisyMixture:
    """A mixture of normal distributions, and the noise in its means.

    Attributes:
        count: n~ of all components; exact if counts are public.
        weights: (K,) on the simplex.
        means: (K, d).
        variances: (K,) spherical, (K, d) diag or (K, d, d) full.
        noise: (K,) variance of the noise in each number of a mean.
    """

    count: float
    weights: Array
    means: Array
    variances: Array
    noise: Array


def plan_for(plan: Plan, iterations: int) -> Plan:
    """The plan of DP-EM, whose noise covers all iterations.

    Under ``replace`` the count of a class is public but not those of its components: a replaced row may change its
    component as it may change its class under ``replace_any``, so that relation's sensitivity holds.

    Raises:
        InputError: the calibration is not ``analytic``, or there is no iteration.
    """
    relation = "replace_any" if plan.relation == "replace" else plan.relation
    return dataclasses.replace(plan, relation=relation, iterations=iterations)


def start(k: int, d: int, covariance: str) -> NoisyMixture:
    """Random directions, the same for all clients: (k, d) unit means, equal weights, variance 1/d."""
    means = generator(0, "dp-em start").normal(size=(k, d))
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    shape = {"spherical": np.ones(k), "diag": np.ones((k, d)), "full": np.tile(np.eye(d), (k, 1, 1))}[covariance]
    return NoisyMixture(0.0, np.full(k, 1 / k), means, shape / d, np.zeros(k))


def responsibilities(x: Array, mixture: NoisyMixture) -> Array:
    """E-step: the probability of each component for each row, (n, K), rows sum to 1.

    The noise of a mean widens its component; else a component of few rows, whose mean is long, would lose them all.
    """
    k, d = mixture.means.shape
    log = np.empty((len(x), k))
    for j in range(k):
        off, variance = x - mixture.means[j], mixture.variances[j]
        if np.ndim(variance) == 2:
            factor = np.linalg.cholesky(variance + mixture.noise[j] * np.eye(d))
            off, scale = np.linalg.solve(factor, off.T).T, np.diag(factor) ** 2
        else:
            scale = np.broadcast_to(variance + mixture.noise[j], (d,))
            off = off / np.sqrt(scale)
        log[:, j] = math.log(mixture.weights[j]) - 0.5 * (off**2).sum(axis=1) - 0.5 * np.log(scale).sum()
    r = np.exp(log - log.max(axis=1, keepdims=True))
    return np.asarray(r / r.sum(axis=1, keepdims=True))


def iteration(x: Array, mixture: NoisyMixture, plan: Plan) -> list[Cell]:
    """The exact sums of one iteration, one cell for each component. Do not send them."""
    r = responsibilities(x, mixture)
    return [statistics(x, plan, r[:, k]) for k in range(r.shape[1])]


def release_mixture(
    x: Array, plan: Plan, key: bytes, purpose: str, *, components: int, iterations: int = 5
) -> NoisyMixture | None:
    """Client half: a mixture of one class; the server draws from it as it is.

    Args:
        x: (n, d) unit rows of the class; n may be 0 unless counts are public.
        plan: of one component; :func:`plan_for` derives the plan that is spent.
        key, purpose: as of :func:`fedfm.methods.fedpft.noisy_moments.release`.
        components, iterations: K and J, fixed before the data are seen.

    Returns:
        At most K components: those whose count does not stand out of its noise are pooled into one. None if that one
        does not stand out either and there is no other; this costs no privacy.

    Raises:
        InputError: x has no unit rows, the key is short, the calibration is not ``analytic``, or K or J is below 1.
    """
    if components < 1:
        raise InputError(f"components is {components}; it must be at least 1")
    if plan.counts_public and not len(x):
        raise InputError("a class without rows has no mixture under relation 'replace': leave it out")
    spent = plan_for(plan, iterations)
    rows = digest(np.asarray(x, np.float64))
    state, mixture = start(components, x.shape[1], plan.covariance), None
    for j in range(iterations):
        where = f"{purpose}\x1fem {j}\x1f{components}\x1f{rows}"
        cells = [noised(c, spent, key, f"{where}\x1f{k}") for k, c in enumerate(iteration(x, state, spent))]
        mixture = maximise(cells, spent)
        if mixture is not None and j + 1 < iterations:
            state = spread(mixture, components, j)
    if mixture is not None and plan.counts_public:
        mixture = dataclasses.replace(mixture, count=float(len(x)))
    return mixture


def maximise(cells: list[Cell], plan: Plan) -> NoisyMixture | None:
    """M-step on noisy sums; components that do not stand out of the noise are pooled."""
    sigma, least = plan.sum_sigma(1), 2 * plan.count_sigma
    kept = [(cell, sigma) for cell in cells if cell.count > least]
    weak = [cell for cell in cells if cell.count <= least]
    if weak:
        seconds = [cell.second for cell in weak if cell.second is not None]
        pool = Cell(
            sum(cell.count for cell in weak),
            np.sum([cell.total for cell in weak], axis=0),
            np.sum(seconds, axis=0) if seconds else None,
        )
        grown = math.sqrt(len(weak))  # the noise of a sum of cells
        if pool.count > least * grown:
            kept.append((pool, sigma * grown))
    if not kept:
        return None
    parts = [normal_of(cell, s) for cell, s in kept]
    counts = np.array([n for n, _, _ in parts])
    return NoisyMixture(
        float(counts.sum()),
        counts / counts.sum(),
        np.array([mean for _, mean, _ in parts]),
        np.array([variance for _, _, variance in parts]),
        np.array([(s / cell.count) ** 2 for cell, s in kept]),
    )


def spread(mixture: NoisyMixture, components: int, j: int) -> NoisyMixture:
    """Restore the number of components: the heaviest is split along random directions."""
    missing, d = components - len(mixture.weights), mixture.means.shape[1]
    if not missing:
        return mixture
    top = int(np.argmax(mixture.weights))
    index = np.append(np.arange(len(mixture.weights)), np.full(missing, top))
    weights, means = mixture.weights[index], mixture.means[index]
    moved = np.append(top, np.arange(len(mixture.weights), components))
    weights[moved] /= len(moved)
    variance = mixture.variances[top]
    trace = variance * d if np.ndim(variance) == 0 else np.trace(variance) if np.ndim(variance) == 2 else variance.sum()
    direction = generator(0, "dp-em split", j).normal(size=(len(moved), d))
    means[moved] += direction * math.sqrt(float(trace)) / d
    return NoisyMixture(mixture.count, weights, means, mixture.variances[index], mixture.noise[index])
