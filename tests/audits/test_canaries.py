"""Canary clients: their bound stays below the truth, refutes broken mechanisms, and reads real runs."""

import math

import numpy as np
import pytest

from fedfm.aggregation import _client_level
from fedfm.api import execute
from fedfm.audits.audit import perform
from fedfm.audits.canaries import finding as of_scores
from fedfm.audits.inference import canaries
from fedfm.cli import main
from fedfm.errors import InputError
from fedfm.privacy import gaussian
from fedfm.privacy.composition import noise_multiplier_for
from fedfm.runtime import client_memory
from small import experiment, features

DELTA, K, R, D = 1e-5, 240, 6, 500


def releases(rng, z, *, length=1.0, shared=False, weights=None):
    """(residuals, signs, directions) of canaries of norm 1 in sums with noise of standard deviation z."""
    u = rng.standard_normal((K, D))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    signs = np.tile([1.0, -1.0, -1.0, 1.0, 1.0, -1.0], (K, 1))
    noise = np.tile(rng.standard_normal(D), (R, 1)) if shared else rng.standard_normal((R, D))
    sums = signs.T @ (u * (length * np.ones(K) if weights is None else weights)[:, None]) + z * noise
    return sums - signs.T @ u, signs, list(u)


def found(seed, epsilon, factor=1.0, **how):
    """Scores of a mechanism that is meant to spend epsilon in all releases; ``factor`` is of its noise."""
    z = factor * noise_multiplier_for(epsilon, DELTA, R)
    return canaries.scores(*releases(np.random.default_rng(seed), z, **how), 1.0)


@pytest.mark.proof
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_the_bound_is_below_the_truth_as_often_as_it_says(epsilon):
    lows = [canaries.epsilon_bound(found(seed, epsilon), D, DELTA, 0.95) for seed in range(40)]
    assert sum(low > epsilon for low in lows) <= 7  # more have a chance of 1e-3 at most
    assert max(canaries.epsilon_bound(found(s, epsilon), D, DELTA, 0.999) for s in range(30)) <= epsilon
    highs = [canaries.epsilon_most(found(seed, epsilon), D, DELTA, 0.95) for seed in range(40)]
    assert sum(high < epsilon for high in highs) <= 7
    assert epsilon < 2.0 or np.mean(lows) > 0.6 * epsilon  # nor is it far below


@pytest.mark.parametrize(("clients", "numbers", "epsilon"), [(2, 20, 3.71), (400, 85, 8.0)])
def test_few_numbers_of_noise_do_not_refute_a_true_claim(clients, numbers, epsilon):
    """The noise is estimated from few numbers. If it seems too small by chance, all scores are too large together."""
    rng, true = np.random.default_rng(1), gaussian_mu(epsilon)
    measured = np.sqrt(rng.chisquare(numbers, 200) / numbers)
    scores = true / measured[:, None] + rng.standard_normal((200, clients))
    refuted = [canaries.epsilon_bound(x, numbers, DELTA, 0.95) > epsilon * (1 + 1e-6) for x in scores]
    assert np.mean(refuted) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
    strictly = [canaries.epsilon_bound(x, numbers, DELTA, 0.9999) > epsilon * (1 + 1e-6) for x in scores]
    assert sum(strictly) <= 1


def gaussian_mu(epsilon):
    """The mu whose Gaussian mechanism has this epsilon, by bisection."""
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian.epsilon_of(1.0, middle, DELTA) < epsilon else (low, middle)
    return low


BROKEN = {
    "half the noise": {"factor": 0.5},
    "noise less by root two": {"factor": math.sqrt(0.5)},
    "noise once a run": {"shared": True},
    "no noise": {"factor": 0.0},
    "no clip": {"length": 10.0},
    "weights by rows": {"weights": np.array([K * 0.5, *[0.5] * (K - 1)])},
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_mechanism_is_refuted(name):
    lows = [canaries.epsilon_bound(found(seed, 4.0, **BROKEN[name]), D, DELTA, 0.99) for seed in range(5)]
    assert sum(low > 4.0 for low in lows) >= 4


def test_counts_alone_are_safe_and_weaker():
    rng = np.random.default_rng(0)
    for seed in range(50):
        scores = found(seed, 4.0)
        bound = canaries.counted_bound(scores, rng.standard_normal(1000), DELTA, 0.95)
        assert bound <= 4.0
    exact = canaries.counted_bound(np.full(2000, np.inf), rng.standard_normal(2000), DELTA, 0.95)
    assert 4.0 < exact < math.log(1000)
    assert canaries.counted_bound(rng.standard_normal(60), rng.standard_normal(60), DELTA, 0.95) == 0.0


def test_the_bound_is_the_gaussian_closed_form_for_many_canaries():
    scores = np.random.default_rng(0).standard_normal(200_000) + 1.5
    low = canaries.epsilon_bound(scores, 10**7, DELTA, 0.95)
    assert low == pytest.approx(gaussian.epsilon_of(1.0, 1.5, DELTA), rel=0.01)


# --- runs


@pytest.fixture(autouse=True)
def _known(monkeypatch, own_identities):
    """The same noise every time."""
    monkeypatch.setattr(client_memory, "entropy", lambda n: bytes(range(n)))


def run(folder, privacy, clients=30, **method):
    features(folder, n=2000, d=64)
    private = {"unit": "client", "target_epsilon": 6.0, "clip_norm": 1.0, "delta": DELTA, **privacy}
    data = {"partition": {"name": "dirichlet", "alpha": 0.5, "clients": clients}}
    execute.run(experiment(folder, privacy=private, data=data, method={"fraction": 1.0, **method}), folder / "run")
    return folder / "run"


@pytest.mark.parametrize(
    ("mean", "verdict", "said"),
    [(1.0, "holds", "claims 8."), (3.0, "inconclusive", "one audit in twenty"), (9.0, "leaks", "it does not hold")],
)
def test_the_verdict_says_what_the_bounds_say(mean, verdict, said):
    """mu = 1.67 is epsilon 8; six scores of 3.0 refute it at 95 %, and not at the level of a contradiction."""
    scores = np.full(6, mean)
    found = of_scores(scores, np.random.default_rng(0).standard_normal(1000), D, 1e-5, 8.0)
    at_95, strict = (canaries.epsilon_bound(scores, D, 1e-5, level) for level in (0.95, 0.9999))
    assert found.low == at_95
    assert (at_95 > 8.0, strict > 8.0) == (verdict != "holds", verdict == "leaks")
    assert (found.verdict, found.contradicts) == (verdict, verdict == "leaks")
    assert said in found.says
    assert found.low <= found.estimate <= found.high


def test_an_estimate_above_the_claim_says_why_it_contradicts_nothing():
    """Ten canaries at 1.2 deviations: epsilon 5.05 for a claim of 3.71, and the low end is far below."""
    found = of_scores(np.full(10, 1.2), np.random.default_rng(0).standard_normal(1000), 5000, 1e-5, 3.71)
    assert found.verdict == "holds"
    assert found.low < 3.71 < found.estimate < found.high
    assert "is above the claim but does not contradict it" in found.says
    assert "low <= bound" in found.to_dict()["rule"]


@pytest.mark.sample("privacy0-method0", "privacy3-method3")
@pytest.mark.parametrize(
    ("privacy", "method"),
    [
        ({}, {}),
        ({}, {"name": "fedadam"}),  # moves the model by more than the mean
        ({"aggregator": "secagg"}, {"fraction": 0.6, "clients": 12}),
        ({"aggregator": "secagg", "mechanism": "distributed_gaussian"}, {"rounds": 2, "clients": 12}),
    ],
)
def test_a_run_that_keeps_its_promise_is_not_accused(privacy, method, tmp_path):
    (finding,) = perform(run(tmp_path, privacy, **method), ["canaries"])
    assert not finding.contradicts
    # Its noise is fresh: one audit in twenty is above the claim at 95 %, and says so.
    assert finding.verdict == ("holds" if finding.low <= finding.bound * (1 + 1e-6) else "inconclusive")
    assert finding.bound == pytest.approx(6.0, rel=1e-6)
    assert finding.low >= 0
    assert (
        (1.0 if len(privacy) == 0 else 0.0) <= finding.estimate < 14.0
    )  # hidden sums draw fresh noise in every test run


@pytest.mark.parametrize("broken", ["half", "once", "no clip"])
def test_the_command_refutes_a_run_of_a_broken_mechanism(broken, tmp_path, monkeypatch):
    draw = _client_level.add_noise

    def noise(key, purpose, steps, scale):
        if broken == "once":
            return steps + draw(key, "the only one", np.zeros_like(steps), scale)
        return draw(key, purpose, steps, scale / 2 if broken == "half" else scale)

    monkeypatch.setattr(_client_level, "add_noise", noise)
    if broken == "no clip":
        step, flat = _client_level.step_of, _client_level.flat_of
        monkeypatch.setattr(
            _client_level, "clip_to_lattice", lambda d, norm: np.rint(flat(d) / step(norm)).astype("i8")
        )
    assert main(["audit", str(run(tmp_path, {})), "--attack", "canaries"]) == 1


@pytest.mark.parametrize(("privacy", "method"), [({}, {"fraction": 0.6}), ({"clip_quantile": 0.5}, {})])
def test_runs_that_canaries_cannot_measure_are_refused(privacy, method, tmp_path):
    with pytest.raises(InputError, match="it can only measure independent noise with a fixed clip"):
        perform(run(tmp_path, privacy, **method), ["canaries"])


def test_runs_without_client_level_privacy_have_no_canaries(tmp_path):
    features(tmp_path)
    execute.run(experiment(tmp_path), tmp_path / "run")
    assert main(["audit", str(tmp_path / "run"), "--attack", "canaries"]) == 2
