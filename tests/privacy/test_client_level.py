"""Client-level differential privacy: the bound on a client, the noise, and an audit of both by GDP."""

import dataclasses
import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedfm.aggregation._lattice import add_noise, clip_to_lattice, step_of
from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.mean import Mean
from fedfm.aggregation.private import CentralGaussian, DistributedGaussian
from fedfm.aggregation.secure import Secure
from fedfm.core.client import Client, ClientData, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.errors import ClientFault, RunError
from fedfm.linalg.params import Params
from fedfm.linalg.running_mean import RunningMean
from fedfm.privacy.composition import epsilon_of_concentrated, noise_multiplier_for, noise_multiplier_for_concentrated
from fedfm.training.scheduler import train_client
from toy import Quadratic, federation

DELTA = 1e-5


def mechanism(cls=CentralGaussian, clip_norm=1.0, z=1.0, **more):
    given = {"delta": DELTA, "budget": math.inf, "releases": 1, "hidden": False} | more
    return cls(clip_norm=clip_norm, noise_multiplier=z, **given)


class NoClients:
    clients = ()


def server(key=bytes(32)):
    """A federation of which only the server's half is used."""
    fed = Federation(NoClients(), model=Quadratic(), aggregator=Aggregator(), secret=lambda name: key)
    fed.begin(1)
    return fed


def client(name="c", memory=None, key=bytes(32)):
    data = ClientData(Rows, Rows, Rows)
    return Client(
        name, data, Quadratic(), {} if memory is None else memory, 0, secret=lambda _: key, trainer=train_client
    )


def released(m, fed, deltas, asked=None, weights=None):
    """One release of these clients' updates, through both halves."""
    weights = weights or [1.0] * len(deltas)
    like = deltas[0].layout
    updates = [m.bound(client(), Update(d, n, {"loss": 3.0})) for d, n in zip(deltas, weights, strict=True)]
    fed.heard = len(updates)
    return m.release(fed, iter(updates), None, asked or len(deltas), like)


# --- what one client can add ------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-(2.0**49), 2.0**49, width=32), min_size=1, max_size=40),
    st.floats(1e-6, 1e6),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_no_update_is_longer_than_the_clipping_norm(values, clip_norm, dtype):
    delta = Params({"a": torch.tensor(values[:3]).to(dtype), "b": torch.tensor(values[3:]), "n": torch.tensor([7])})
    steps = clip_to_lattice(delta, clip_norm)
    num, den = clip_norm.as_integer_ratio()
    step = step_of(clip_norm).as_integer_ratio()
    # Exact in whole numbers: sum k^2 step^2 <= C^2.
    assert sum(int(k) ** 2 for k in steps) * (step[0] * den) ** 2 <= (num * step[1]) ** 2
    m = mechanism(clip_norm=clip_norm)
    sent = m.bound(client(), Update(delta, 5.0, {"loss": 1.0}))
    assert sent.weight == 1.0
    assert sent.metrics == {}
    assert sent.delta["n"].tolist() == [0]
    assert sent.delta.layout is m.wire(delta.layout)
    assert (
        clip_to_lattice(sent.delta, clip_norm) == steps
    ).all()  # float32 is exact, and a second call changes nothing


def test_a_short_update_is_kept_but_for_its_last_bits():
    delta = Params({"w": torch.randn(1000, generator=torch.Generator().manual_seed(0)) / 100})
    kept = clip_to_lattice(delta, 1.0) * step_of(1.0)
    assert np.abs(kept - delta["w"].double().numpy()).max() < step_of(1.0)
    with pytest.raises(ClientFault, match="NaN"):
        clip_to_lattice(Params({"w": torch.tensor([math.nan])}), 1.0)


def test_numbers_of_rows_and_failures_do_not_change_the_weights():
    a, b = Params({"w": torch.tensor([0.5, 0.0])}), Params({"w": torch.tensor([0.0, 0.5])})
    m = mechanism(z=1e-9)
    even, uneven = (released(m, server(), [a, b], weights=w)["w"] for w in ([1.0, 1.0], [91.0, 9.0]))
    assert torch.equal(even, uneven)
    assert even.tolist() == pytest.approx([0.25, 0.25], abs=1e-6)
    assert released(m, server(), [a], asked=2)["w"].tolist() == pytest.approx([0.25, 0.0], abs=1e-6)
    nobody = m.release(server(), iter([]), None, 2, a.layout)
    assert nobody["w"].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_the_server_clips_an_update_that_a_client_did_not():
    lie = Update(Params({"w": torch.tensor([300.0, 400.0])}), 1.0)
    m = mechanism(z=1e-9)
    got = m.release(server(), iter([lie]), None, 1, lie.delta.layout)
    assert got["w"].tolist() == pytest.approx([0.6, 0.8], abs=1e-5)


# --- the noise --------------------------------------------------------------------------------------------------------


def test_the_noise_has_its_variance_and_its_shape():
    n, scale = 100_000, 2.5 * 2**20
    drawn = add_noise(b"k" * 32, "p", np.zeros(n, np.int64), scale) / scale
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], n) / n
    assert low < float(drawn @ drawn) / n < high
    assert stats.kstest(drawn, "norm").pvalue > 1e-6
    for wrong in (0.5, math.sqrt(0.5), 1.02):
        assert not low < float(drawn @ drawn) * wrong**2 / n < high


def test_the_mean_has_the_noise_of_its_fixed_denominator():
    m, like = mechanism(z=2.0, clip_norm=3.0), Params({"w": torch.zeros(50_000)})
    got = released(m, server(), [like] * 4, asked=8)["w"]
    assert float(got.std()) == pytest.approx(2.0 * 3.0 / 8, rel=0.02)


def test_a_release_beyond_the_accounted_number_is_refused():
    m, fed = mechanism(releases=2), server()
    like = Params({"w": torch.zeros(2)})
    fed.begin(1)
    released(m, fed, [like])
    released(m, fed, [like])
    with pytest.raises(RunError, match="release 3 in a round for which 2 are accounted"):
        released(m, fed, [like])
    fed.begin(2)
    released(m, fed, [like])
    fed.begin(0)
    with pytest.raises(RunError, match="release 1 in a round for which 0 are accounted"):
        released(m, fed, [like])


def test_a_tensor_that_does_not_change_is_found_in_the_first_round():
    before, after = Params({"a": torch.zeros(2), "b": torch.ones(2)}), Params({"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(RunError, match="b did not change"):
        mechanism().check(server(), lambda state: state, before, after)
    mechanism().check(server(), lambda state: state, before, after + after)


# --- what is spent ----------------------------------------------------------------------------------------------------


def exact_epsilon(mu, delta):
    """Epsilon of mu-GDP (Balle and Wang 2018, Theorem 8), by bisection."""
    low, high = 0.0, 500.0
    for _ in range(200):
        e = (low + high) / 2
        d = stats.norm.cdf(mu / 2 - e / mu) - math.exp(e) * stats.norm.cdf(-mu / 2 - e / mu)
        low, high = (e, high) if d > delta else (low, e)
    return high


@pytest.mark.parametrize(("z", "rounds", "releases"), [(4.0, 4, 1), (1.0, 10, 1), (20.0, 50, 2)])
def test_epsilon_is_the_closed_form(z, rounds, releases):
    m = mechanism(z=z, releases=releases)
    assert m.epsilon_after(rounds) == pytest.approx(exact_epsilon(math.sqrt(rounds * releases) / z, DELTA), rel=1e-6)


@pytest.mark.parametrize("budget", [3.0, 8.0, 20.0])
def test_a_budget_allows_the_rounds_up_to_its_epsilon(budget):
    m = mechanism(z=1.5, budget=budget)
    rounds = m.affordable(100)
    assert m.epsilon_after(rounds) <= budget < m.epsilon_after(rounds + 1)
    assert m.affordable(rounds - 1) == rounds - 1


@pytest.mark.parametrize("rho", [0.01, 0.5, 4.0])
def test_concentrated_privacy_is_that_of_renyi_orders(rho):
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders=1 + np.logspace(-3, 5, 4000))
    accountant.compose(dp.GaussianDpEvent(1 / math.sqrt(2 * rho)))
    assert epsilon_of_concentrated(rho, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)
    assert epsilon_of_concentrated(rho, DELTA) >= exact_epsilon(math.sqrt(2 * rho), DELTA)


def test_the_noise_for_a_target_spends_at_most_the_target():
    for calibrate, cls in (
        (noise_multiplier_for, CentralGaussian),
        (noise_multiplier_for_concentrated, DistributedGaussian),
    ):
        z = calibrate(6.0, DELTA, 7)
        assert 6.0 * 0.999 < mechanism(cls, z=z).epsilon_after(7) <= 6.0


# --- D2: an audit of the release --------------------------------------------------------------------------------------

TRIALS = 400
ROUNDS = 2


class HalfTheNoise(CentralGaussian):
    def _noisy(self, fed, total, purpose, asked):
        return dataclasses.replace(honest(self), noise_multiplier=self.noise_multiplier / 2)._noisy(
            fed, total, purpose, asked
        )


class LessByRootTwo(CentralGaussian):
    def _noisy(self, fed, total, purpose, asked):
        less = dataclasses.replace(honest(self), noise_multiplier=self.noise_multiplier / math.sqrt(2))
        return less._noisy(fed, total, purpose, asked)


class OnceARun(CentralGaussian):
    def _noisy(self, fed, total, purpose, asked):
        return total + add_noise(fed.secret("noise"), "run", np.zeros_like(total), self.noise_multiplier / self.step)


class NoClip(CentralGaussian):
    def bound(self, client, update):
        return dataclasses.replace(update, weight=1.0)

    def release(self, fed, updates, rule, asked, like):
        wide = dataclasses.replace(honest(self), clip_norm=1e3, noise_multiplier=self.noise_multiplier / 1e3)
        return wide.release(fed, updates, rule, asked, like)


class WeighedByRows(CentralGaussian):
    """The noise of equal weights on a mean weighted by numbers of rows."""

    def bound(self, client, update):
        return dataclasses.replace(super().bound(client, update), weight=update.weight)

    def release(self, fed, updates, rule, asked, like):
        mean = RunningMean()
        for update in updates:
            mean.add(update.weight, update.delta)
        noise = super().release(fed, iter([]), rule, asked, like)
        return mean.result() + noise


def honest(m):
    return CentralGaussian(**vars(m))


def measured(m, trials=TRIALS):
    """Lower bound of epsilon, 95 %: an attacker that knows all but whether the last of 8 clients took part.

    It sends an update in one direction in the first round and in the other in the second; the statistic is the
    difference of the two means. GDP bound: mu >= Phi^-1(1 - a) - Phi^-1(b) with the rates a of false alarms and b of
    misses.
    """
    others = [Params({"w": torch.tensor([0.1, 0.02 * i])}) for i in range(7)]

    def statistic(trial, present):
        fed = server(hashlib.sha256(f"{trial} {present}".encode()).digest())
        means = []
        for t, sign in zip(range(1, ROUNDS + 1), (1.0, -1.0), strict=True):
            fed.begin(t)
            canary = Params({"w": torch.tensor([5.0 * sign, 0.0])})
            deltas, weights = [*others, *[canary] * present], [10.0] * 7 + [700.0] * present
            means.append(released(m, fed, deltas, 8, weights)["w"][0].item())
        return means[0] - means[1]

    without, with_ = (np.array([statistic(i, present) for i in range(trials)]) for present in (0, 1))
    threshold = (np.median(without) + np.median(with_)) / 2
    errors = int((without > threshold).sum()), int((with_ <= threshold).sum())
    high = [stats.beta.ppf(1 - 0.0125, e + 1, trials - e) for e in errors]
    mu = stats.norm.ppf(1 - high[0]) - stats.norm.ppf(high[1])
    return exact_epsilon(mu, DELTA) if mu > 0 else 0.0


def promised(cls, epsilon):
    return mechanism(cls, z=noise_multiplier_for(epsilon, DELTA, ROUNDS))


@pytest.mark.parametrize(
    ("epsilon", "trials"),
    [
        pytest.param(4.0, TRIALS, marks=pytest.mark.proof),
        *(pytest.param(epsilon, 1000, marks=pytest.mark.release) for epsilon in (0.5, 1.0, 2.0, 8.0)),
    ],
)
def test_an_audit_does_not_refute_the_stated_epsilon(epsilon, trials):
    least = 0.6 * epsilon if epsilon >= 2 else 0.0  # so few trials say little of a small one
    assert least <= measured(promised(CentralGaussian, epsilon), trials) <= epsilon


@pytest.mark.parametrize("broken", [HalfTheNoise, LessByRootTwo, OnceARun, NoClip, WeighedByRows])
@pytest.mark.proof
def test_a_broken_mechanism_is_caught(broken):
    assert measured(promised(broken, 4.0)) > 4.0


# --- noise that the clients add ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Nothing(Method):
    """Clients send updates of zeros."""

    means = ("train",)
    rounds: int = 1
    size: int = 20_000

    def init(self, fed):
        return fed.initial

    def step(self, fed, state, t):
        like = Params({"w": torch.zeros(self.size)}).layout
        return fed.mean(self.train, like=like)

    @on_client
    def train(self, client: Client) -> Update:
        return Update(Params({"w": torch.zeros(self.size)}), 3.0)

    def params_for(self, state, client):
        return state


def hidden(m, threshold=0.5):
    secure = Secure(bound=2.0**10, threshold=threshold)
    object.__setattr__(secure, "mechanism", m)
    return secure


@pytest.mark.parametrize(("dropped", "threshold"), [(0, 0.5), (2, 0.5), (1, 0.7)])
def test_every_unmasked_sum_has_the_stated_noise(dropped, threshold, tmp_path, monkeypatch):
    m, method, n = mechanism(DistributedGaussian, z=2.0, hidden=True, threshold=threshold), Nothing(), 6
    fed = federation(method, {f"c{i}": [1.0] for i in range(n)}, tmp_path, aggregator=hidden(m, threshold))
    protect = type(Secure().transport).protect

    def dropping(self, client, update):
        if client.id in [f"c{i}" for i in range(dropped)]:
            raise ClientFault("E_EXCEPTION", "gone")
        return protect(self, client, update)

    monkeypatch.setattr(type(Secure().transport), "protect", dropping)
    fed.begin(1)
    got = method.step(fed, None, 1)["w"].double() * n
    least = math.floor(threshold * n + 1e-9) + 1
    share = 2.0**2 / least
    assert float(got.var()) == pytest.approx(share * (n - dropped), rel=0.06)
    assert share * (n - dropped) >= 2.0**2


class Different(Nothing):
    """Each client sends a vector of its own."""

    @on_client
    def train(self, client: Client) -> Update:
        drawn = torch.randn(self.size, generator=torch.Generator().manual_seed(int(client.id[1:])))
        return Update(Params({"w": drawn}), 3.0)


@pytest.mark.proof
def test_secure_sums_with_the_servers_noise_have_the_bits_of_sums_in_the_clear(tmp_path):
    plain = Mean()
    object.__setattr__(plain, "mechanism", mechanism())
    results = []
    for aggregator in (plain, hidden(mechanism(hidden=True))):
        rows = {f"c{i}": [1.0] for i in range(40)}
        fed = federation(Different(), rows, tmp_path / type(aggregator).__name__, aggregator=aggregator)
        fed.secret = lambda name: b"s" * 32
        fed.begin(1)
        results.append(Different().step(fed, None, 1))
    assert torch.equal(results[0]["w"], results[1]["w"])
