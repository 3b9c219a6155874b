"""Canary rows: their bound stays below the truth, refutes broken variants of DP-SGD, and reads real runs."""

import hashlib
import itertools
import json
import math

import numpy as np
import pytest

from fedfm.api import execute
from fedfm.audits.audit import choose, perform
from fedfm.audits.inference import row_canaries
from fedfm.audits.inference.row_canaries import Readings
from fedfm.audits.replay import open_finished
from fedfm.cli import main
from fedfm.privacy import gaussian
from fedfm.privacy.composition import Releases, epsilon_of
from fedfm.privacy.dp_sgd import PrivateSteps
from fedfm.runtime import client_memory
from fedfm.training import private, row_gradients
from small import experiment, features

DELTA = 1e-5
pytestmark = pytest.mark.usefixtures("coarse_accounting")


@pytest.fixture(autouse=True)
def _the_same_noise_every_time(monkeypatch):
    numbers = itertools.count()
    monkeypatch.setattr(
        client_memory, "entropy", lambda n: hashlib.sha256(f"rows {next(numbers)}".encode()).digest()[:n]
    )


# --- figures ----------------------------------------------------------------------------------------------------------
def drawn(seed, z, q, steps=12, k=300, foretold=False):
    """Readings of canaries under Poisson sampling at rate q and noise z; an attacker may know the coins."""
    rng = np.random.default_rng(seed)
    taken, guess = rng.random((2, k, steps)) < q
    x = taken / z + rng.standard_normal((k, steps))
    return Readings(x, 1 / z, taken, taken if foretold else guess, 10**6)


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.2), (2.0, 1.0)])
def test_the_bound_is_below_the_truth_as_often_as_it_says(z, q):
    claimed = Releases(z, 12, q)
    truth = epsilon_of([claimed], DELTA)
    lows = [row_canaries.epsilon_bound(drawn(seed, z, q), claimed, DELTA, 0.95) for seed in range(6)]
    assert sum(low > truth for low in lows) <= 2  # more have a chance of 2e-3
    assert np.mean(lows) > 0.75 * truth  # and it is of use
    rng = np.random.default_rng(0)
    counted = [row_canaries.bound_by_counts(drawn(s, z, q), q, DELTA, 0.95, rng) for s in range(6)]
    assert max(counted) <= truth


def test_coins_that_are_known_do_not_amplify():
    z, q = 1.2, 0.1
    claimed = Releases(z, 40, q)
    truth = gaussian.epsilon_of(1.0, math.sqrt(4) / z, DELTA)  # four steps, known which
    low = row_canaries.epsilon_bound(drawn(0, z, q, 40, 2000, foretold=True), claimed, DELTA, 0.95)
    assert epsilon_of([claimed], DELTA) < low < truth


def test_scores_find_a_row_as_well_as_the_best_test_allows():
    """The counted bound is near that of the exact error rates at the best of its thresholds."""
    rng = np.random.default_rng(0)
    low = row_canaries.bound_by_counts(drawn(1, 0.5, 1.0, steps=1, k=40_000), 1.0, DELTA, 0.95, rng)
    from scipy.stats import norm

    best = max(
        math.log(norm.sf(t - 2) / norm.sf(t)) for t in (norm.isf(0.5) + 2, norm.isf(0.8) + 2, norm.isf(0.95) + 2)
    )
    assert 0.8 * best < low < best


@pytest.mark.parametrize("q", [0.05, 0.4])
def test_coins_that_are_not_independent_are_recognised(q):
    rng = np.random.default_rng(0)
    n, steps = 400, 60
    assert not any(row_canaries.coins_differ([rng.random((n, steps)) < q], q) for _ in range(30))
    sized = np.zeros((n, steps), dtype=bool)
    for t in range(steps):
        sized[rng.permutation(n)[: round(q * n)], t] = True
    assert row_canaries.coins_differ([sized], q)
    assert row_canaries.coins_differ([rng.random((n, steps)) < 1.5 * q], q)
    assert row_canaries.coins_differ([np.repeat(rng.random((n, 1)) < q, steps, 1)], q)


def test_shared_noise_is_found_and_independent_noise_is_not():
    rng = np.random.default_rng(0)
    one, two = rng.standard_normal((2, 30, 500))
    assert not row_canaries.noise_repeats([one, two])
    two[7] = one[3] + 0.5 * two[7]
    assert row_canaries.noise_repeats([one, two])


# --- runs -------------------------------------------------------------------------------------------------------------
def run(folder, privacy=None, clients=2, **method):
    features(folder, n=500, d=16)
    private_ = {"mechanism": "dp_sgd", "unit": "record", "noise_multiplier": 1.0, "clip_norm": 0.5, "delta": DELTA}
    tables = experiment(
        folder,
        privacy=private_ | (privacy or {}),
        data={"partition": {"name": "iid", "clients": clients}},
        method={"fraction": 1.0, "rounds": 3, "local": {"epochs": 2, "batch_size": 40, "learning_rate": 0.5}} | method,
    )
    execute.run(tables, folder / "run")
    return folder / "run"


@pytest.mark.sample("privacy0-method0")
@pytest.mark.parametrize(
    ("privacy", "method"),
    [
        ({}, {}),
        ({}, {"name": "fedadam", "local": {"name": "adam", "batch_size": 16}}),
        ({"noise_multiplier": 6.0}, {"clients": 4, "local": {"batch_size": 200}}),  # every row in every step
        ({"aggregator": "secagg"}, {"clients": 12}),
    ],
)
def test_a_run_that_keeps_its_promise_is_not_accused(privacy, method, tmp_path):
    path = run(tmp_path, privacy, **method)
    assert set(choose(open_finished(path))) >= {"row_canaries", "row_norms"}
    canaries, norms = perform(path, ["row_canaries", "row_norms"])
    stated = json.loads((path / "manifest.json").read_text())["result"]["epsilon"]
    assert norms.verdict == "holds"
    assert canaries.verdict == ("holds" if canaries.low <= stated * (1 + 1e-6) else "inconclusive")  # fresh noise
    assert canaries.bound == stated
    assert 0.25 * stated < canaries.low < 1.05 * stated
    assert canaries.detail["independent_coins"]
    assert 0.5 < norms.estimate <= 1


def half(keep, patch):
    patch.setattr(PrivateSteps, "noisy", lambda self, x, step: keep["noisy"](self, 2 * x, step) / 2)


def once(keep, patch):
    """One noise in all steps of a round."""
    patch.setattr(PrivateSteps, "noisy", lambda self, x, step: x + keep["noisy"](self, 0 * x, 0))


def first(keep, patch):
    """Noise in the first step of a round alone, but for what keeps every number moving."""

    def noisy(self, x, step):
        return keep["noisy"](self, x, step) if step == 0 else x + 1e-3 * keep["noisy"](self, 0 * x, step)

    patch.setattr(PrivateSteps, "noisy", noisy)


def known_noise(keep, patch):
    """Noise from a key that is the same for everybody."""

    def noisy(self, x, step):
        rng = np.random.default_rng([self._place, step])
        return x + self.sigma * rng.standard_normal(x.shape)

    patch.setattr(PrivateSteps, "noisy", noisy)


def unclipped(keep, patch):
    for module in (private, row_gradients):
        patch.setattr(module, "factors", lambda squared, c: squared.new_ones(squared.shape))


def blocks(keep, patch):
    """Rows in their order, accounted as if they were drawn."""

    def batch(self, step):
        b = int(self.expected_size)
        return np.arange(self._n)[(step * b + np.arange(b)) % self._n]

    patch.setattr(PrivateSteps, "batch", batch)


def shuffled(keep, patch):
    """Batches of one size in a secret order."""

    def batch(self, step):
        rng = np.random.default_rng([*np.frombuffer(self._key[:8], dtype=np.uint8).tolist(), self._place + step])
        return rng.permutation(self._n)[: int(self.expected_size)]

    patch.setattr(PrivateSteps, "batch", batch)


def twice(keep, patch):
    """Each row with twice the probability."""
    patch.setattr(
        PrivateSteps, "batch", lambda self, step: np.union1d(keep["batch"](self, step), keep["batch"](self, step + 999))
    )


def shared_coins(keep, patch):
    """Coins from a key that is the same for everybody."""

    def batch(self, step):
        return np.flatnonzero(np.random.default_rng([self._place, step]).random(self._n) < self.expected_size / self._n)

    patch.setattr(PrivateSteps, "batch", batch)


@pytest.mark.sample("once", "shared_coins")
@pytest.mark.parametrize(
    "fault",
    [half, once, first, known_noise, unclipped, blocks, shuffled, twice, shared_coins],
    ids=lambda f: f.__name__,
)
def test_the_command_refutes_a_run_of_a_broken_variant(fault, tmp_path, monkeypatch):
    fault({name: getattr(PrivateSteps, name) for name in ("noisy", "batch")}, monkeypatch)
    assert main(["audit", str(run(tmp_path)), "--attack", "row_canaries"]) == 1


def test_gradients_of_the_runs_own_model_that_are_not_clipped_are_found(tmp_path, monkeypatch):
    head = private._head

    def loose(model, rows, clip_norm):
        return head(model, rows, 2 * clip_norm)

    monkeypatch.setattr(private, "_head", loose)
    path = run(tmp_path)
    assert main(["audit", str(path), "--attack", "row_canaries"]) == 0  # its rows have gradients of their own
    assert main(["audit", str(path), "--attack", "row_norms"]) == 1


@pytest.mark.proof
def test_a_claim_that_is_too_small_is_refuted(tmp_path):
    path = run(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["result"]["epsilon"] *= 0.7
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert main(["audit", str(path)]) == 1


def test_few_rows_are_trained_on_several_times_and_no_round_is_no_claim(tmp_path):
    path = run(tmp_path, clients=20)
    (finding,) = perform(path, ["row_canaries"])
    assert finding.detail["canaries"] >= 300
    assert not finding.contradicts


def test_runs_without_private_steps_have_no_canary_rows(tmp_path):
    features(tmp_path)
    execute.run(experiment(tmp_path), tmp_path / "run")
    assert main(["audit", str(tmp_path / "run"), "--attack", "row_canaries"]) == 2
