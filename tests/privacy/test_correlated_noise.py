"""Noise that the rounds share: its mathematics against dense matrices, its releases, and whole runs."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

import fedfm
from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.private import CentralGaussian, CorrelatedGaussian
from fedfm.config.experiment import Experiment
from fedfm.core.federation import Federation
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.privacy.cohorts import rotation
from fedfm.privacy.composition import noise_multiplier_for
from fedfm.privacy.correlated import Strategy, strategy
from fedfm.sites.release_cost import ReleaseCosts
from small import experiment as small
from small import pictures, tiny_vit
from stopping import run_stopped, stop_in_means
from toy import Quadratic

DELTA = 1e-5
CLIENT = {
    "unit": "client",
    "noise_multiplier": 0.5,
    "clip_norm": 1.0,
    "delta": DELTA,
    "mechanism": "correlated_gaussian",
}
SHAPES = [(2, 2), (7, 3), (12, 4), (12, 12), (20, 2), (30, 5)]


def dense(s):
    """C as a matrix."""
    return np.array(
        [
            [s.coefficients[i - j] if 0 <= i - j < len(s.coefficients) else 0.0 for j in range(s.rounds)]
            for i in range(s.rounds)
        ]
    )


def patterns(rounds, period):
    return [list(range(i, rounds, period)) for i in range(min(period, rounds))]


# --- the strategy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rounds", "period"), SHAPES)
def test_the_sensitivity_is_the_largest_of_all_clients(rounds, period):
    s, rng = strategy(rounds, period), np.random.default_rng(0)
    c = dense(s)
    attained = max(np.linalg.norm(c[:, p].sum(1)) for p in patterns(rounds, period))  # equal vectors
    assert s.sensitivity() == pytest.approx(attained)
    for p in patterns(rounds, period):
        for _ in range(50):  # any vectors of norm 1 at most, in any of the client's rounds
            u = rng.standard_normal((len(p), 3))
            u *= (rng.random(len(p)) / np.linalg.norm(u, axis=1))[:, None]
            assert np.linalg.norm(c[:, p] @ u) <= attained * (1 + 1e-12)
    for n in range(1, rounds + 1):
        first = [p for p in patterns(n, period) if p]
        assert s.sensitivity(n) == pytest.approx(max(np.linalg.norm(c[:n, p].sum(1)) for p in first))


@pytest.mark.parametrize(("rounds", "period"), SHAPES)
def test_the_noise_of_the_models_is_that_of_dense_matrices(rounds, period):
    s = strategy(rounds, period)
    a = np.tril(np.ones((rounds, rounds)))
    b = a @ np.linalg.inv(dense(s))
    assert s.deviations() == pytest.approx(np.linalg.norm(b, axis=1))
    assert s.inverse() == pytest.approx(np.linalg.inv(dense(s))[:, 0])
    assert s.last() == pytest.approx(np.linalg.norm(b[-1]) * s.sensitivity())


@pytest.mark.parametrize(("rounds", "period", "most"), [(20, 2, 0.8), (50, 5, 0.54), (50, 10, 0.43), (200, 20, 0.3)])
def test_correlated_noise_beats_independent_noise_at_equal_privacy(rounds, period, most):
    s, independent = strategy(rounds, period), Strategy((1.0,), rounds, period)
    assert independent.last() == pytest.approx(math.sqrt(rounds * math.ceil(rounds / period)))
    assert s.last() < most * independent.last()
    prefixes = [np.sqrt(np.mean(x.deviations() ** 2)) * x.sensitivity() for x in (s, independent)]
    assert prefixes[0] < 1.2 * most * prefixes[1]


@pytest.mark.parametrize(("rounds", "period"), [(12, 3), (24, 6), (16, 16)])
def test_no_other_toeplitz_matrix_is_much_better(rounds, period):
    """Compared with all numbers of bands, and coefficients that an optimiser finds."""
    best = strategy(rounds, period).last()
    root = [math.comb(2 * i, i) / 4**i for i in range(rounds)]
    assert best == pytest.approx(min(Strategy(tuple(root[:p]), rounds, period).last() for p in range(1, rounds + 1)))

    def error(x):
        return Strategy((1.0, *np.abs(x)), rounds, period).last()

    start = np.array(root[1:])
    found = optimize.minimize(error, start, method="L-BFGS-B", options={"maxiter": 200})
    assert 0.9 * best < found.fun <= best * 1.2


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 6), st.data())
def test_with_every_client_in_every_round_nothing_beats_independent_noise(rounds, data):
    """For any lower triangular C: the last model's deviation times the sensitivity is T at least."""
    numbers = st.floats(-2, 2).map(lambda x: round(x, 3))
    c = np.diag([data.draw(st.floats(0.2, 3)) for _ in range(rounds)])
    for i, j in itertools.combinations(range(rounds), 2):
        c[j, i] = data.draw(numbers)
    last = np.linalg.norm(np.linalg.solve(c.T, np.ones(rounds)))
    signs = itertools.product((-1.0, 1.0), repeat=rounds)
    assert last * max(np.linalg.norm(c @ np.array(s)) for s in signs) >= rounds * (1 - 1e-9)
    assert strategy(rounds, 1).coefficients == (1.0,)


@pytest.mark.parametrize(("rounds", "period"), [(8, 2), (9, 3), (6, 6), (10, 2)])
def test_any_answers_of_a_silo_cost_at_most_what_its_ledger_counts(rounds, period):
    s = Strategy(strategy(60, 12).coefficients[:rounds], rounds, period)  # more bands than the period
    c, one = dense(s), s.of_one_answer()
    for p in patterns(rounds, period):
        for n in range(1, len(p) + 1):
            for answers in itertools.combinations(p, n):
                assert np.linalg.norm(c[:, answers].sum(1)) <= one * math.sqrt(n) * (1 + 1e-12)


# --- the releases -----------------------------------------------------------------------------------------------------


class Nobody:
    clients = tuple(f"c{i}" for i in range(6))


def server(seed=0, memory=None):
    return Federation(
        Nobody(),
        model=Quadratic(),
        aggregator=Aggregator(),
        seed=seed,
        secret=lambda name: bytes(32),
        memory=None if memory is None else lambda t: memory,
    )


def mechanism(rounds, period, z=1.0, clip_norm=1.0):
    return CorrelatedGaussian(clip_norm, z, DELTA, math.inf, 1, False, rounds=rounds, period=period)


def test_the_releases_have_the_noise_of_the_strategy():
    rounds, period, size = 12, 3, 20_000
    m, fed, like = mechanism(rounds, period, z=1.5, clip_norm=2.0), server(), Params({"w": torch.zeros(size)}).layout
    noise = []
    for t in range(1, rounds + 1):
        fed.begin(t)
        asked = m.divisor(fed, m.cohort(fed))
        assert asked == pytest.approx(2.0)
        noise.append(m.release(fed, iter([]), None, asked, like)["w"].double().numpy() * asked)
    z = dense(m.strategy) @ np.array(noise)  # independent, each with the deviation z C
    assert z.std(1) == pytest.approx([3.0] * rounds, rel=0.04)
    assert np.abs(np.corrcoef(z) - np.eye(rounds)).max() < 5.5 / math.sqrt(size)
    models = np.cumsum(noise, 0).std(1)
    assert models == pytest.approx(3.0 * m.strategy.deviations(), rel=0.04)


def test_a_round_repeats_its_noise_for_the_same_sum_only():
    m, like = mechanism(4, 2), Params({"w": torch.zeros(1000)}).layout
    noises = []
    for value in (0.0, 0.0, 0.5):
        fed = server()
        for t, x in ((1, value), (2, 0.0)):
            fed.begin(t)
            update = m.bound(None, fedfm.Update(Params({"w": torch.full((1000,), x / 40)}), 1.0))
            got = m.release(fed, iter([update]), None, 1.0, like)["w"] - update.delta["w"]
        noises.append(got.numpy())
    assert (noises[0] == noises[1]).all()
    # An equal sum after another history: with the old row, differences of rounds would show that of the histories.
    assert abs(np.corrcoef(noises[0], noises[2])[0, 1]) < 0.15


def test_without_the_sums_of_earlier_rounds_there_is_no_release():
    m, fed = mechanism(4, 2), server()
    fed.begin(3)
    with pytest.raises(RunError, match="earlier rounds is lost"):
        m.release(fed, iter([]), None, 1.0, Params({"w": torch.zeros(2)}).layout)


def test_clients_take_turns():
    m, fed = mechanism(9, 4), server(seed=3)
    rounds = {name: [] for name in fed.clients}
    for t in range(1, 10):
        fed.begin(t)
        for name in m.cohort(fed):
            rounds[name].append(t)
    assert all(np.diff(at).tolist() == [4] * (len(at) - 1) and at for at in rounds.values())
    groups = rotation(3, fed.clients, 4, {})
    assert sorted(np.bincount(list(groups.values()))) == [1, 1, 2, 2]
    assert rotation(4, fed.clients, 4, {}) != groups
    more = rotation(5, (*fed.clients, "z"), 4, groups)  # a newcomer moves nobody
    assert {name: more[name] for name in fed.clients} == groups
    with pytest.raises(RunError, match="6 clients cannot form 7 groups"):
        mechanism(9, 7).cohort(fed)


# --- what it spends ---------------------------------------------------------------------------------------------------


def exact_delta(mu, epsilon):
    """Delta of mu-GDP (Balle and Wang 2018, Theorem 8)."""
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("rounds", "period"), [(10, 2), (30, 5)])
def test_epsilon_is_that_of_the_dense_sensitivity(rounds, period):
    m = mechanism(rounds, period, z=2.0)
    c = dense(m.strategy)
    for n in (1, rounds // 2, rounds):
        mu = max(np.linalg.norm(c[:n, p].sum(1)) for p in patterns(n, period)) / 2.0
        assert exact_delta(mu, m.epsilon_after(n)) == pytest.approx(DELTA, rel=1e-4)


# --- whole runs -------------------------------------------------------------------------------------------------------


def tables(folder, privacy=CLIENT, **method):
    features = {"partition": {"name": "dirichlet", "alpha": 1.0, "clients": 9}}
    return small(folder, data=features, method={"fraction": 1 / 3, "rounds": 6, **method}, privacy=privacy)


def test_the_ledger_states_the_strategy(tmp_path):
    result = fedfm.run(tables(tmp_path), tmp_path / "run")
    sensitivity = strategy(6, 3).sensitivity()
    assert exact_delta(sensitivity / 0.5, result["epsilon"]) == pytest.approx(DELTA, rel=1e-4)
    run = fedfm.load_run(tmp_path / "run")
    (entry,) = run.manifest["ledger"]["entries"]
    assert (entry["sensitivity"], entry["sigma"]) == (pytest.approx(sensitivity), 0.5)
    assert "each client in one of 3 rounds, in a rotation" in entry["composition"]
    cohorts = [set(line["cohort"]) for line in run.metrics() if line["round"]]
    assert cohorts[:3] == cohorts[3:]
    assert len(set.union(*cohorts[:3])) == 9 == sum(map(len, cohorts[:3]))
    cost = ReleaseCosts(run.experiment)
    assert (1 - 1e-9) * result["epsilon"] <= cost.epsilon(DELTA) < 1.2 * result["epsilon"]
    target = {k: v for k, v in CLIENT.items() if k != "noise_multiplier"} | {"target_epsilon": 5.0}
    m = Experiment.from_dict(tables(tmp_path, target)).aggregation.mechanism
    assert 4.99 < m.epsilon_after(6) <= 5.0
    assert m.noise_multiplier == pytest.approx(noise_multiplier_for(5.0, DELTA) * sensitivity)


def test_the_bits_are_those_of_every_worker_and_of_hidden_sums(tmp_path, known_secrets):
    found = {fedfm.run(tables(tmp_path), tmp_path / "run")["params_sha256"]}
    e = tables(tmp_path)
    found.add(fedfm.run(e | {"run": e["run"] | {"workers": 2, "wire": True}}, tmp_path / "wire")["params_sha256"])
    found.add(fedfm.run(tables(tmp_path, CLIENT | {"aggregator": "secagg"}), tmp_path / "hidden")["params_sha256"])
    assert len(found) == 1


@pytest.mark.parametrize("at", [1, 4])
def test_a_killed_run_repeats_its_noise(at, tmp_path, known_secrets, monkeypatch):
    straight = fedfm.run(tables(tmp_path), tmp_path / "straight")
    seen = stop_in_means(monkeypatch, lambda seen: len(seen) == at)
    run_stopped(tables(tmp_path), tmp_path / "run")
    resumed = fedfm.resume(tmp_path / "run")
    assert seen[at - 1] == seen[at]
    assert (resumed["params_sha256"], resumed["epsilon"]) == (straight["params_sha256"], straight["epsilon"])


def test_a_budget_ends_the_run_early(tmp_path):
    m = Experiment.from_dict(tables(tmp_path)).aggregation.mechanism
    budget = (m.epsilon_after(3) + m.epsilon_after(4)) / 2
    result = fedfm.run(tables(tmp_path, CLIENT | {"halt_at_epsilon": budget}), tmp_path / "run")
    assert (result["rounds"], result["epsilon"]) == (3, pytest.approx(m.epsilon_after(3)))


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"fraction": 1.0}, "independent noise is best"),
        ({"fraction": 0.3}, "must be whole; method.fraction is 0.3"),
        ({"fraction": 0.5, "rounds": 1}, "at least two rounds"),
        ({"name": "average", "fraction": None, "rounds": None, "local": None}, "independent noise is best"),
    ],
)
def test_settings_that_correlated_noise_does_not_support_are_refused(method, said, tmp_path):
    e = tables(tmp_path, **method)
    e["method"] = {key: value for key, value in e["method"].items() if value is not None}
    with pytest.raises(InputError, match=said):
        Experiment.from_dict(e)


def test_a_frozen_backbone_keeps_its_bits_and_the_adapter_moves(tmp_path, monkeypatch):
    """The first round of a private run: what noise must move, and what it cannot."""
    start, checked = {}, []

    def check(self, fed, model_of, before, after):
        original(self, fed, model_of, before, after)
        fed.model.load(model_of(after))
        for name, tensor in fed.model.module.state_dict().items():
            checked.append((name in fed.model.names, torch.equal(tensor, start[name])))

    def begin(self, link, *, model, **more):
        start.update({name: tensor.clone() for name, tensor in model.module.state_dict().items()})
        made(self, link, model=model, **more)

    original, made = CentralGaussian.check, Federation.__init__
    monkeypatch.setattr(CentralGaussian, "check", check)
    monkeypatch.setattr(Federation, "__init__", begin)
    e = {
        "data": {"path": str(pictures(tmp_path)), "partition": {"name": "iid", "clients": 3}},
        "model": {"name": str(tiny_vit(tmp_path))},
        "method": {"name": "fedavg", "rounds": 1},
        "privacy": {key: value for key, value in CLIENT.items() if key != "mechanism"},
        "run": {"workers": 1},
    }
    fedfm.run(e, tmp_path / "run")
    assert len(checked) > 10
    assert {same for trainable, same in checked if trainable} == {False}
    assert {same for trainable, same in checked if not trainable} == {True}
