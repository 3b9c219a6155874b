"""Cohorts by secret coins: the cohort, the divisor of the sum, the cost, and complete runs."""

import dataclasses
import hashlib
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad

import fedfm
from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.mean import Mean
from fedfm.aggregation.private import CentralGaussian
from fedfm.core.client import Client, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.method import Method
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.privacy.cohorts import by_coins
from fedfm.privacy.composition import Releases, epsilon_of
from fedfm.runtime import client_memory
from small import experiment as small
from stopping import StopAfter, run_stopped, stop_in_means
from toy import Quadratic, federation

DELTA = 1e-5
CLIENT = {"unit": "client", "noise_multiplier": 0.8, "clip_norm": 1.0, "delta": DELTA}


def mechanism(rate, z=1.0, releases=1):
    return CentralGaussian(1.0, z, DELTA, math.inf, releases, False, rate)


@dataclasses.dataclass(frozen=True)
class Basis(Method):
    """Client i sends 0.5 in coordinate i."""

    means = ("train",)
    rounds: int = 1
    fraction: float = 0.3
    clients: int = 40
    asks_all: bool = False

    def init(self, fed):
        return fed.initial

    def step(self, fed, state, t):
        like = Params({"w": torch.zeros(self.clients)}).layout
        drawn = fed.sample(self.fraction)
        return fed.mean(self.train, of=None if self.asks_all else drawn, like=like)

    @on_client
    def train(self, client: Client) -> Update:
        w = torch.zeros(self.clients)
        w[int(client.id[1:])] = 0.5
        return Update(Params({"w": w}), 7.0)

    def params_for(self, state, client):
        return state


def made(tmp_path, method, m, key=b"s" * 32, **more):
    aggregator = Mean()
    object.__setattr__(aggregator, "mechanism", m)
    rows = {f"c{i:02d}": [1.0] for i in range(method.clients)}
    fed = federation(method, rows, tmp_path, aggregator=aggregator, **more)
    fed.secret = lambda name: key + name.encode()
    return fed


# --- the coins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.02, 0.5, 0.97])
def test_coins_have_their_rate_and_are_independent(rate):
    names = [f"hospital-{i}" for i in range(500)]
    drawn = np.array([np.isin(names, by_coins(b"k" * 32, t, names, rate)) for t in range(1, 101)], dtype=float)
    n = drawn.size
    assert stats.binomtest(int(drawn.sum()), n, rate).pvalue > 1e-6
    for a, b in ((drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])):  # of one client, and of one round
        assert abs(((a - rate) * (b - rate)).mean()) < 5 * rate * (1 - rate) / math.sqrt(a.size)


def test_a_coin_depends_on_key_round_and_name_alone():
    names = [f"c{i}" for i in range(200)]
    first = by_coins(b"k" * 32, 3, names, 0.5)
    assert by_coins(b"k" * 32, 3, names[50:150], 0.5) == [name for name in first if name in names[50:150]]
    assert by_coins(b"l" * 32, 3, names, 0.5) != first != by_coins(b"k" * 32, 4, names, 0.5)
    assert set(by_coins(b"k" * 32, 3, names, 0.2)) <= set(first)


# --- the sum ----------------------------------------------------------------------------------------------------------


def test_the_mean_divides_the_sum_by_the_expected_cohort(tmp_path):
    method = Basis()
    fed = made(tmp_path, method, mechanism(0.3, z=1e-9))
    for t in range(1, 4):
        fed.begin(t)
        got = method.step(fed, None, t)["w"]
        taken = torch.tensor([name in fed.cohort for name in fed.clients])
        assert fed.cohort == tuple(by_coins(b"s" * 32 + b"cohort", t, fed.clients, 0.3))
        assert 0 < int(taken.sum()) < 40
        assert torch.allclose(got, taken * (0.5 / (0.3 * 40)), atol=1e-6)
        assert fed.heard == 12  # the expected number, not that of this round


def test_an_empty_cohort_releases_noise_only(tmp_path):
    method = Basis(fraction=1e-4, clients=2000)
    fed = made(tmp_path, method, mechanism(1e-4, z=0.01), min_clients=1)
    fed.begin(1)
    got = method.step(fed, None, 1)["w"]
    assert fed.cohort == ()
    assert float(got.std()) == pytest.approx(0.01 / (1e-4 * 2000), rel=0.1)
    assert float(got.abs().max()) < 0.3


def test_only_a_cohort_of_failed_clients_stops_a_run(tmp_path, monkeypatch):
    method = Basis(fraction=0.05)
    fed = made(tmp_path, method, mechanism(0.05), min_clients=30)
    t = next(t for t in range(1, 99) if by_coins(b"s" * 32 + b"cohort", t, fed.clients, 0.05))
    fed.begin(t)
    method.step(fed, None, t)
    monkeypatch.setattr(CentralGaussian, "bound", lambda self, client, update: 1 / 0)
    fed.begin(t)
    fed.process_memory.clear()
    with pytest.raises(RunError, match="clients gave a valid reply"):
        method.step(fed, None, t)


def test_a_method_that_asks_other_clients_is_stopped_before_sending(tmp_path):
    method = Basis(asks_all=True)
    fed = made(tmp_path, method, mechanism(0.3))
    fed.begin(1)
    with pytest.raises(RunError, match="does not ask the clients"):
        method.step(fed, None, 1)
    assert fed.call == 0
    with pytest.raises(RunError, match=r"\[privacy\] assumes the fraction 0\.3"):
        fed.sample(0.5)


# --- what it spends ---------------------------------------------------------------------------------------------------


def exact_delta(epsilon, z, q):
    """Delta of one round, by integration: the larger of removing and adding a client with a unit vector."""

    def one(x):
        return stats.norm.pdf(x, 0, z)

    def mixed(x):
        return (1 - q) * one(x) + q * stats.norm.pdf(x, 1, z)

    def beyond(p, r):
        return quad(lambda x: max(p(x) - math.exp(epsilon) * r(x), 0.0), -12 * z, 1 + 12 * z, limit=500)[0]

    return max(beyond(mixed, one), beyond(one, mixed))


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.3), (0.7, 0.1), (2.0, 0.6)])
def test_one_round_spends_the_delta_of_the_two_densities(z, q):
    epsilon = mechanism(q, z).epsilon_after(1)
    assert exact_delta(epsilon * 1.001, z, q) <= DELTA
    assert exact_delta(epsilon * 0.99, z, q) > DELTA
    assert epsilon < mechanism(1.0, z).epsilon_after(1)


def test_all_means_of_a_round_use_the_same_coins():
    together, apart = mechanism(0.2, 1.5, releases=2).epsilon_after(5), epsilon_of([Releases(1.5, 10, 0.2)], DELTA)
    assert together == pytest.approx(epsilon_of([Releases(1.5 / math.sqrt(2), 5, 0.2)], DELTA))
    assert together > apart  # as if each mean had a coin of its own


class AskedForCertain(CentralGaussian):
    """Its cohorts always have the client that the attacker looks for."""

    def cohort(self, fed):
        return sorted({*super().cohort(fed), *({"target"} & set(fed.clients))})


def least_epsilon(m, trials=1500):
    """Lower bound of epsilon, 99.9 %, of one who sees the mean and knows all but whether the target is a client.

    The target sends the unit vector. With rates a of alarms without it and b with it, b <= exp(epsilon) a + delta.
    """

    def mean(trial, names):
        fed = Federation(
            Named(names), model=Quadratic(), aggregator=Aggregator(), secret=lambda name: key + name.encode()
        )
        key = hashlib.sha256(f"{trial} {names}".encode()).digest()
        fed.begin(1)
        unit = Params({"w": torch.tensor([1.0, 0.0])})
        sent = [Update(unit * float(name == "target"), 1.0) for name in m.cohort(fed)]
        return m.release(fed, iter(sent), None, 1.0, unit.layout)["w"][0].item()

    without, with_ = (np.array([mean(i, names) for i in range(trials)]) for names in (("a",), ("a", "target")))
    found = []
    for threshold in np.quantile(np.concatenate([without[::2], with_[::2]]), [0.5, 0.8, 0.9, 0.95, 0.98]):
        a, b = int((without[1::2] > threshold).sum()), int((with_[1::2] > threshold).sum())
        high = stats.beta.ppf(1 - 1e-4, a + 1, trials // 2 - a)
        low = stats.beta.ppf(1e-4, b, trials // 2 - b + 1) if b else 0.0
        found.append(math.log(max(low - DELTA, 1e-12) / high))
    return max(found)


class Named:
    def __init__(self, clients):
        self.clients = clients


@pytest.mark.proof
def test_an_attacker_stays_within_the_bound_only_with_secret_coins():
    half = mechanism(0.5, z=0.5)
    assert 1.0 < least_epsilon(half) <= half.epsilon_after(1)  # it does find what there is
    tight = mechanism(0.01, z=1.0)
    assert least_epsilon(tight) <= tight.epsilon_after(1) < 0.5 < least_epsilon(AskedForCertain(**vars(tight)))


# --- whole runs -------------------------------------------------------------------------------------------------------


def tables(folder, privacy=CLIENT, **method):
    return small(folder, method={"fraction": 0.4, **method}, privacy=privacy)


@pytest.fixture
def known(monkeypatch):
    """Secrets that a test knows."""
    monkeypatch.setattr(client_memory, "entropy", lambda n: b"\x07" * n)


@pytest.mark.proof
def test_the_ledger_counts_the_coins(tmp_path):
    result = fedfm.run(tables(tmp_path), tmp_path / "run")
    assert result["epsilon"] == pytest.approx(epsilon_of([Releases(0.8, 4, 0.4)], DELTA))
    assert result["epsilon"] < 0.7 * epsilon_of([Releases(0.8, 4)], DELTA)
    (entry,) = fedfm.load_run(tmp_path / "run").manifest["ledger"]["entries"]
    assert "probability 0.4 by a secret coin" in entry["composition"]
    assert "not against those who see who took part" in entry["note"]
    target = tables(tmp_path, {k: v for k, v in CLIENT.items() if k != "noise_multiplier"} | {"target_epsilon": 3.0})
    assert 2.95 < fedfm.run(target, tmp_path / "target")["epsilon"] <= 3.0


def test_secure_sums_get_no_amplification_by_coins(tmp_path):
    e = tables(tmp_path, CLIENT | {"aggregator": "secagg"}, fraction=0.8)
    assert fedfm.run(e, tmp_path / "run")["epsilon"] == pytest.approx(epsilon_of([Releases(0.8, 4)], DELTA))


def test_the_bits_and_the_cohorts_depend_on_the_secret_alone(tmp_path, known, monkeypatch):
    found, cohorts = set(), []
    for i, change in enumerate(({"workers": 1}, {"workers": 2}, {"workers": 1, "wire": True})):
        e = tables(tmp_path)
        found.add(fedfm.run(e | {"run": e["run"] | change}, tmp_path / str(i))["params_sha256"])
        cohorts.append([line["cohort"] for line in fedfm.load_run(tmp_path / str(i)).metrics()])
    assert len(found) == 1
    assert cohorts[0] == cohorts[1] == cohorts[2]
    monkeypatch.setattr(client_memory, "entropy", lambda n: b"\x08" * n)
    fedfm.run(tables(tmp_path), tmp_path / "other")
    assert [line["cohort"] for line in fedfm.load_run(tmp_path / "other").metrics()] != cohorts[0]


def test_a_killed_run_asks_the_same_clients_again(tmp_path, known, monkeypatch):
    straight = fedfm.run(tables(tmp_path), tmp_path / "straight")
    seen = stop_in_means(monkeypatch, lambda seen: len(seen) == 2)
    run_stopped(tables(tmp_path), tmp_path / "run")
    monkeypatch.setattr(client_memory, "entropy", lambda n: b"\x08" * n)  # no secret is drawn again
    resumed = fedfm.resume(tmp_path / "run")
    assert seen[1] == seen[2]
    assert (resumed["params_sha256"], resumed["epsilon"]) == (straight["params_sha256"], straight["epsilon"])


def test_a_resume_without_its_coins_is_refused(tmp_path, monkeypatch):
    run_stopped(tables(tmp_path), tmp_path / "run", progress=StopAfter(2))
    (tmp_path / "run/private/server/cohort.secret").unlink()
    with pytest.raises(InputError, match=r"cohort\.secret is missing"):
        fedfm.resume(tmp_path / "run")


@pytest.mark.proof
def test_a_budget_counts_the_coins(tmp_path):
    two, three = (epsilon_of([Releases(0.8, n, 0.4)], DELTA) for n in (2, 3))
    e = tables(tmp_path, CLIENT | {"halt_at_epsilon": (two + three) / 2})
    result = fedfm.run(e, tmp_path / "run")
    assert (result["rounds"], result["epsilon"]) == (2, pytest.approx(two))
