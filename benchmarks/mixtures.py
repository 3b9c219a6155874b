"""Mixtures of many classes' features: fedfm's EM against one scikit-learn GaussianMixture a class, as FedPFT's listing.

    python benchmarks/mixtures.py
    python benchmarks/mixtures.py --dims 192 384 --groups 60

Groups of 5 to 500 rows of one class. With 192 dimensions rows are ViT-tiny features of CIFAR-10 where
``../shared/data/features`` has them, divided by their norm; else, and with other dimensions, they are drawn from
clusters in a subspace. Both sides start from the same labels and stop by the same rule (tolerance 1e-3, at most 100
iterations); scikit-learn computes in float64, on one thread as fedfm does. Its ``GaussianMixture`` is given the labels
instead of its own k-means, so that the start costs it one M step, and each group's floor as ``reg_covar``. The
log-likelihoods of a row have to agree to 1e-4 of their size (at least 1), group by group; weights, means and
covariances to 1e-3, in standard deviations of the group, where both sides took as many iterations.

What is and what is not computed: both sides end with weights, means, covariances and the mean log-likelihood. fedfm has
the covariances as what travels, standard deviations or Cholesky factors; scikit-learn also has the precisions' factors.
With one component fedfm takes the closed form, without the log-likelihood; scikit-learn iterates, and evaluates every
row: two E steps, the second of which finds that nothing has changed.

Ratios are of CPU seconds. "With starts" adds k-means++ and three iterations of k-means to fedfm's side and
scikit-learn's default k-means to the other; those starts differ. Compilation is timed in a process of its own with an
empty cache.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import common
import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

from fedfm.methods.fedpft.mixtures import fit

CASES = ((1, "diag", 20), (5, "diag", 7), (10, "diag", 6), (10, "spherical", None), (1, "full", 15))
FIELD = {"max_iter": 100, "tol": 1e-3}


class Given(GaussianMixture):  # type: ignore[misc]
    """GaussianMixture from labels that are given; also with one component it runs no k-means."""

    def _initialize_parameters(self, X: Any, random_state: Any, **options: Any) -> None:
        self._initialize(X, np.eye(self.n_components)[self.labels], **options)


def features(d: int, count: int, rng: np.random.Generator) -> tuple[list[Any], str]:
    """Groups (n, d) of float32 rows, and where they come from."""
    sizes = rng.integers(5, 501, count)
    source = common.SHARED / "features" / "cifar10.vit_tiny.npz"
    if d == 192 and source.exists():
        with np.load(source) as data:
            rows, labels = data["feat"].astype(np.float32), data["label"]
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        classes = [rows[labels == c] for c in np.unique(labels)]
        take = [classes[i % len(classes)] for i in range(count)]
        return [rng.permutation(t)[:n] for t, n in zip(take, sizes, strict=True)], "CIFAR-10, ViT-tiny"
    groups = []
    for n in sizes:
        span = rng.normal(size=(d // 6, d)) * np.geomspace(1, 0.1, d // 6)[:, None]
        inner = rng.normal(size=(8, d // 6))[rng.integers(0, 8, n)] + rng.normal(size=(n, d // 6))
        x = inner @ span + 0.3 * rng.normal(size=(n, d))
        groups.append((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32))
    return groups, "drawn"


def labels_of(x: Any, k: int, rng: np.random.Generator) -> Any:
    """Labels that both sides start from: two iterations of k-means from random rows, all of them in use."""
    centres = x[rng.choice(len(x), k, replace=False)]
    for _ in range(2):
        near = ((x * x).sum(1)[:, None] - 2 * x @ centres.T + (centres * centres).sum(1)).argmin(1)
        centres = np.stack([x[near == c].mean(0) if (near == c).any() else centres[c] for c in range(k)])
    return np.unique(near, return_inverse=True)[1]


def covariances(m: Any) -> Any:
    """The covariances of fedfm's mixture, in scikit-learn's shape."""
    wide = m.scales.astype(np.float64)
    return wide @ wide.transpose(0, 2, 1) if wide.ndim == 3 else wide * wide


def distance(m: Any, peer: Any, variance: float) -> float:
    """The largest difference of a weight, of a mean (standard deviations) or of a covariance (variances)."""
    return max(
        float(np.abs(m.weights - peer.weights_).max()),
        float(np.abs(m.means - peer.means_).max()) / variance**0.5,
        float(np.abs(covariances(m) - peer.covariances_).max()) / variance,
    )


def case(d: int, groups: list[Any], source: str, k: int, covariance: str, turns: int) -> dict[str, Any]:
    """One row of the table; stops where the two sides disagree."""
    rng = np.random.default_rng(k)
    starts = [labels_of(x, min(k, len(x)), rng) for x in groups]
    count, seeds, several = len(groups), list(range(len(groups))), [int(s.max()) + 1 for s in starts]
    wide = [x.astype(np.float64) for x in groups]
    peers, defaults = [], []
    for x, labels, kk in zip(wide, starts, several, strict=True):
        common_to_both = {"covariance_type": covariance, "reg_covar": 1e-6 * x.var(0).mean() + 1e-12} | FIELD
        peers.append(Given(kk, **common_to_both))
        peers[-1].labels = labels
        defaults.append(GaussianMixture(min(k, len(x)), random_state=0, **common_to_both))
    found: dict[str, Any] = {}

    def ours() -> None:
        found["ours"] = fit(groups, several, covariance, seeds=seeds, starts=starts, **FIELD)

    def theirs() -> None:
        for model, x in zip(peers, wide, strict=True):
            model.fit(x)

    def all_theirs() -> None:
        for model, x in zip(defaults, wide, strict=True):
            model.fit(x)

    variants: dict[str, Callable[[], Any]] = {"fedfm": ours, "peer": theirs}
    variants["fedfm, starts"] = lambda: fit(groups, [k] * count, covariance, seeds=seeds, **FIELD)
    variants["peer, starts"] = all_theirs
    times = common.interleave(variants, turns)
    pairs = [
        (f.mixture.log_prob(x).mean() if k == 1 else f.log_likelihood, p.lower_bound_)
        for f, p, x in zip(found["ours"], peers, wide, strict=True)
    ]
    apart = max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
    if apart > 1e-4:
        raise SystemExit(f"d = {d}, K = {k}, {covariance}: log-likelihoods differ by {apart} of their size")
    far = max(
        distance(f.mixture, p, float(x.var(0).mean()))
        for f, p, x in zip(found["ours"], peers, wide, strict=True)
        if k == 1 or f.iterations == p.n_iter_
    )
    if far > 1e-3:
        raise SystemExit(f"d = {d}, K = {k}, {covariance}: mixtures differ by {far} standard deviations")
    same = sum(f.iterations == p.n_iter_ for f, p in zip(found["ours"], peers, strict=True))
    return {
        "d, rows": f"{d}, {source}",
        "K, covariance": f"{k}, {covariance}",
        "fedfm, us a group": round(1e6 * common.median(times["fedfm"]) / count),
        "scikit-learn": round(1e6 * common.median(times["peer"]) / count),
        "ratio": common.ratio(times["peer"], times["fedfm"]),
        "ratio with starts": common.ratio(times["peer, starts"], times["fedfm, starts"]),
        "mean iterations": float(np.mean([p.n_iter_ for p in peers])),
        "groups of equal iterations": "closed form" if k == 1 else f"{same} of {count}",
        "largest difference": f"{apart:.1g}",
        "of mixtures": f"{far:.1g}",
    }


def compile_seconds() -> float:
    """CPU seconds that a process with an empty cache of compiled code needs more than one with a full cache."""
    code = (
        "import time, json, numpy as np; from fedfm.methods.fedpft.mixtures import fit; at = time.process_time(); "
        "fit([np.eye(9)], [3], 'diag', seeds=[0]); print(json.dumps({'s': time.process_time() - at}))"
    )
    before = os.environ.get("NUMBA_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="fedfm-bench-") as folder:
        os.environ["NUMBA_CACHE_DIR"] = folder
        first, second = (common.child("-c", code)["s"] for _ in range(2))
    os.environ.pop("NUMBA_CACHE_DIR")
    if before is not None:
        os.environ["NUMBA_CACHE_DIR"] = before
    return float(first - second)


def main() -> None:
    options = common.arguments(
        __doc__,
        dims={"type": int, "nargs": "+", "default": [192]},
        groups={"type": int, "default": 60},
        turns={"type": int, "default": 5},
    )
    turns, count = (2, 12) if options.quick else (options.turns, options.groups)
    rows, goals, notes = [], [], []
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)  # k-means that finds duplicates
        for d in options.dims:
            groups, source = features(d, count, np.random.default_rng(d))
            for k, covariance, least in CASES:
                rows.append(case(d, groups, source, k, covariance, turns))
                if least:
                    name = f"times scikit-learn, d = {d}, K = {k}, {covariance}"
                    goals.append(common.goal(name, rows[-1]["ratio"]["median"], least=least))
    title = f"{count} groups of 5 to 500 rows, one thread"
    notes.append(f"Compiling, once: {compile_seconds():.1f} CPU seconds, load {os.getloadavg()[0]:.1f}.")
    sys.stdout.flush()
    common.emit("Mixtures by EM", [{"title": title, "rows": rows}], goals, notes)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
