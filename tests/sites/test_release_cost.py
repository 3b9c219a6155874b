"""What a silo counts for an answer: the guarantee that the experiment states, and the party that adds the noise."""

import math

import pytest
from scipy.stats import norm

from fedfm.config.experiment import Experiment
from fedfm.config.registry import available, resolve
from fedfm.core.capabilities import Private
from fedfm.errors import InputError
from fedfm.privacy.composition import Releases as R
from fedfm.privacy.composition import epsilon_of, epsilon_of_concentrated, noise_multiplier_for_concentrated
from fedfm.runtime.result import spending
from fedfm.sites.ledger import NOTHING, UNBOUNDED, Cost, Entry, Totals
from fedfm.sites.release_cost import ReleaseCosts
from small import experiment

DELTA = 1e-5
RECORD = {"unit": "record", "target_epsilon": 1.0, "delta": DELTA}
CLIENT = {"unit": "client", "target_epsilon": 4.0, "delta": DELTA, "clip_norm": 1.0}
SHARES = {"mechanism": "distributed_gaussian", "aggregator": "secagg"}
PRIVACY = [RECORD, RECORD | SHARES, CLIENT, CLIENT | SHARES]


def experiments(folder):
    """Every method under every [privacy] table, at one round and at three, if the method allows it."""
    for method in available("methods"):
        for privacy in PRIVACY:
            for keys in ({}, {"rounds": 3}, {"pooled": True}):
                tables = experiment(folder, privacy=privacy)
                tables["method"] = {"name": method, **keys}
                try:
                    yield method, Experiment.from_dict(tables)
                except InputError:
                    continue


@pytest.mark.proof
def test_a_silo_counts_at_least_the_epsilon_that_the_experiment_states(tmp_path):
    """For every method, whatever its number of means, and whoever adds the noise."""
    counted = {}
    for method, e in experiments(tmp_path):
        stated, costs = spending(e, [40] * 5).epsilon, ReleaseCosts(e, 40)
        assert stated is not None
        assert stated * (1 - 1e-6) <= costs.epsilon(DELTA) <= stated * (1 + 1e-6), (method, e.method, e.privacy)
        counted.setdefault(method, set()).add((len(e.method.means), costs.mechanism, costs.release.by))
        totals = Totals()  # what the ledger counts once every answer of every round has left
        for t in range(1, e.method.rounds + 1):
            for handler in e.method.means or e.method.asks:
                one = costs.of(("train." if e.method.means else "query.") + handler)
                totals.add(_entry(f"{handler} {t}", one))
        assert totals.epsilon(DELTA) == pytest.approx(costs.epsilon(DELTA), rel=1e-9)
    assert counted["analytic"] == {(1, "own", "silo"), (1, "distributed_gaussian", "silo")}
    assert counted["fedpft"] == {(0, "own", "silo"), (1, "gaussian", "server")}
    assert counted["ghofl"] == {(1, "gaussian", "server"), (1, "distributed_gaussian", "silo")}
    assert {n for found in counted.values() for n, _, _ in found} == {0, 1, 2}
    assert counted.keys() >= {m for m in available("methods") if issubclass(resolve("methods", m), Private)}


def _entry(asked, cost):
    known = {"time": "", "run": "r", "experiment": "", "round": 1, "call": 1, "method": "", "handler": asked}
    return Entry(**known, exposes="mean", form="plain", bytes=1, sha256=asked, epsilon=None, cost=cost, asked=asked)


def test_under_dp_sgd_every_answer_of_a_method_has_its_noise(tmp_path):
    """A single reply, too: the client half reads training rows by its private optimiser alone."""
    privacy, taken = {"mechanism": "dp_sgd", **RECORD, "clip_norm": 1.0}, {}
    for method in available("methods"):
        try:
            e = Experiment.from_dict(experiment(tmp_path, privacy=privacy) | {"method": {"name": method}})
        except InputError:
            continue
        costs = ReleaseCosts(e, 40)
        halves = [f"train.{name}" for name in e.method.means] + [f"query.{name}" for name in e.method.asks]
        taken[method] = {costs.of(handler) for handler in halves}
        assert taken[method] == {costs.release}, method
        assert costs.of("scores.Evaluation_evaluate") == UNBOUNDED
    assert taken.keys() >= {"fedavg", "fedawa", "fedbip"}


def test_a_method_that_adds_noise_at_the_server_draws_its_key_there(tmp_path):
    """The party that a method names agrees with where the key of the noise is."""
    for method, e in experiments(tmp_path):
        if isinstance(e.method, Private):
            drawn = "server" if e.method.traits.server_secrets else "silo"
            assert e.method.noise_by == drawn, method


def test_a_method_that_names_no_party_has_noise_that_the_silo_cannot_check():
    assert Private.noise_by == "server"


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0])
def test_shares_are_counted_in_concentrated_privacy_and_never_as_one_gaussian(epsilon):
    """The closed form of a Gaussian, by scipy, is smaller; rho adds up over releases of both kinds."""
    z = noise_multiplier_for_concentrated(epsilon, DELTA)
    assert epsilon_of([R(z, concentrated=True)], DELTA) == pytest.approx(epsilon, rel=1e-6)
    mu = 1 / z
    tail = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
    assert tail < DELTA  # one Gaussian of this noise would have less than epsilon
    both = epsilon_of([R(z, 2, concentrated=True), R(2.0)], DELTA)
    assert both == pytest.approx(epsilon_of_concentrated(1 / z**2 + 1 / 8, DELTA))
    sampled = epsilon_of([R(z, concentrated=True), R(2.0, 5, 0.1)], DELTA)
    apart = epsilon_of_concentrated(1 / (2 * z**2), DELTA / 2) + epsilon_of([R(2.0, 5, 0.1)], DELTA / 2)
    assert sampled == pytest.approx(apart)


def test_the_ledger_keeps_how_noise_is_counted():
    z = noise_multiplier_for_concentrated(1.0, DELTA)
    shares = Cost("record", "add_remove", z, by="silo", concentrated=True)
    assert Totals().epsilon(DELTA, shares) == pytest.approx(1.0, rel=1e-6)
    totals = Totals()
    totals.releases.update([shares, shares])
    assert totals.epsilon(DELTA, NOTHING) == pytest.approx(epsilon_of_concentrated(1 / z**2, DELTA))
