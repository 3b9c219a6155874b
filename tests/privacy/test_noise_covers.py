"""The same noise never covers two different numbers: one property, for every mechanism that adds noise.

Each mechanism gives the noise of one release, release less exact numbers, for a base case and for cases that differ
from it in one thing: a row, a weight, a round, an order, a seed, a shape, a purpose, a deviation. Two noises that share
a stream, shifted, scaled, cut or in part, are found by the largest correlation of a block over all shifts.
"""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfm
from fedfm.aggregation._secagg import MEMORY
from fedfm.aggregation._secagg_session import Sum
from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.private import CentralGaussian, CorrelatedGaussian, DistributedGaussian
from fedfm.core.client import Client, ClientData, Update
from fedfm.core.federation import Federation
from fedfm.core.rows import Rows
from fedfm.errors import ClientFault, RunError
from fedfm.linalg.params import Params
from fedfm.methods.fedbaf import fedbaf
from fedfm.methods.fedbaf.pull import Piece
from fedfm.methods.fedfed import FedFed
from fedfm.methods.fedpft import private as fedpft
from fedfm.methods.fedpft.noisy_moments import release, statistics
from fedfm.methods.fedpft.noisy_sums import federation_sum
from fedfm.methods.fedpft.release_plan import Plan
from fedfm.privacy import noise
from fedfm.privacy.clipping import AdaptiveClip
from fedfm.privacy.dp_sgd import DescentPlan, PrivateSteps
from fedfm.privacy.noise import unit_rows
from fedfm.training.scheduler import train_client
from toy import Quadratic

KEY = bytes(range(32))
P = 1500  # numbers of a release
ZEROS = np.zeros(P)


def likeness(a, b):
    """The largest correlation of a block of the one noise with as many numbers of the other, wherever they are."""
    size = min(300, len(a), len(b))
    windows = np.sqrt(np.convolve(b**2, np.ones(size), "valid"))
    blocks = [a[at : at + size] for at in range(0, len(a) - size + 1, size)]
    return max(np.max(np.abs(np.correlate(b, x, "valid")) / windows) / np.linalg.norm(x) for x in blocks)


def independent(a, b):
    return likeness(a, b) < 7 / math.sqrt(min(300, len(a), len(b)))


def bumped(x, at=0):
    """The same numbers but for the last bit of one."""
    out = np.array(x)
    out.flat[at] = np.nextafter(out.flat[at], math.inf)
    return out


def client(x=None, **more):
    """A client, whose rows have these features (n, d) and one class."""
    rows = Rows({"features": torch.tensor(ZEROS[None] if x is None else x.copy()).float()})
    rows = dataclasses.replace(rows, labels=torch.zeros(len(rows), dtype=torch.int64))
    given = {"memory": {}, "seed": 1, "secret": lambda _: KEY, "write_once": {}.setdefault} | more
    return Client("c", ClientData(lambda: rows, Rows, Rows), Features(), **given, trainer=train_client)


class Features(Quadratic):
    classes = ("a",)

    def features(self, rows):
        return rows.tensors["features"]


class NoClients:
    clients = ()


def server(t=1, key=KEY):
    fed = Federation(NoClients(), model=Quadratic(), aggregator=Aggregator(), secret=lambda name: key)
    fed.begin(t)
    return fed


# --- the mechanisms ---------------------------------------------------------------------------------------------------


def steps(total=ZEROS, start="s", t=1, step=0, z=1.0, n=50, count=10, c=1.0):
    budget = PrivateSteps(DescentPlan(c, 1e-5, 3, noise_multiplier=z), client(round=t), n, 5, count)
    budget.begin(start)
    return budget.noisy(total, step) - total


def coins(start="s", t=1, step=0, n=4000, b=2000, count=10):
    budget = PrivateSteps(DescentPlan(1.0, 1e-5, 3, noise_multiplier=1.0), client(round=t), n, b, count)
    budget.begin(start)
    taken = np.full(n, -1.0)
    taken[budget.batch(step)] = 1.0
    return taken


def vector(x=ZEROS):
    return Params({"w": torch.tensor(x, dtype=torch.float64)})


def mean(x=ZEROS, t=1, number=1, z=1.0, c=1.0):
    m = CentralGaussian(c, z, 1e-5, math.inf, 2, hidden=False)
    fed, update = server(t), m.bound(client(), Update(vector(x), 1.0))
    for _ in range(number):
        got = m.release(fed, iter([update]), None, 1.0, update.delta.layout)["w"]
    return got.double().numpy() - update.delta["w"].double().numpy()


def share(x=ZEROS, number=0, session="a", seed=1, cohort=5, z=1.0):
    m = DistributedGaussian(1.0, z, 1e-5, math.inf, 1, hidden=True)
    told = Sum(number, torch.ones(cohort, dtype=torch.uint8))
    who = client(memory={MEMORY: {"session": session}}, seed=seed, aggregation_message=told)
    sent = m.bound(who, Update(vector(x), 1.0)).delta["w"].numpy()
    return sent - exact(x)


def exact(x):
    m = CentralGaussian(1.0, 1.0, 1e-5, math.inf, 1, hidden=True)
    return m.bound(client(), Update(vector(x), 1.0)).delta["w"].numpy()


def history(first=0.0, second=0.0, third=0.0, z=1.0, size=P):
    """The noise of round 3."""
    m = CorrelatedGaussian(1.0, z, 1e-5, math.inf, 1, hidden=False, rounds=4, period=2)
    fed = server()
    for t, x in ((1, first), (2, second), (3, third)):
        fed.begin(t)
        update = m.bound(client(), Update(vector(np.full(size, x / 100)), 1.0))
        got = m.release(fed, iter([update]), None, 1.0, update.delta.layout)["w"]
    return got.double().numpy() - update.delta["w"].double().numpy()


def count(norms=(0.1,), t=1, asked=1.0):
    """The noise of an adaptive clip's count, of many keys."""
    m = CentralGaussian(1.0, 1.0, 1e-5, math.inf, 1, hidden=False, adaptive=AdaptiveClip(1.0, 0.5, 0.2))
    found = []
    for key in range(150):
        fed = server(t, key.to_bytes(32, "big"))
        updates = [m.bound(client(scale=1.0), Update(vector([x]), 1.0)) for x in norms]
        m.release(fed, iter(updates), None, asked, vector([0.0]).layout)
        found.append(fed.metrics["within_clip_norm"] * asked - sum(x <= 1 for x in norms))
    return np.array(found) - np.mean(found)


X = unit_rows(np.random.default_rng(0).normal(size=(8, P)))
SMALL = unit_rows(np.random.default_rng(0).normal(size=(8, 55)))  # 1,540 second moments
TRIANGLE = noise.packed_scale(55)


def sums(x=X, purpose="c/moments/0", epsilon=1.0, key=KEY):
    plan = Plan("add_remove", "spherical", epsilon=epsilon)
    return release(x, plan, key, purpose).total - statistics(x, plan).total


def seconds(x=SMALL, purpose="c/moments/0", epsilon=1.0):
    plan = Plan("add_remove", "full", epsilon=epsilon)
    return (release(x, plan, KEY, purpose).second - statistics(x, plan).second) / TRIANGLE


MEANS = np.stack([np.append(8.0, X.sum(0)), np.append(3.0, X[:3].sum(0))])


def pooled(means=MEANS, clients=2, purpose="sum 0", epsilon=1.0):
    plan = Plan("add_remove", "spherical", epsilon=epsilon)
    return federation_sum(means, clients, plan, means.shape[1] - 1, KEY, purpose)[0].total - clients * means[0, 1:]


def foundation(pre=ZEROS, harden="noise_once", t=0, w0=3.0, level=1.0):
    method = fedbaf.FedBaF(harden=harden, noise=level, foundation="x")
    fed = server()
    fed.initial = Params({"w": torch.full((4,), w0)})
    fed.model = type("Live", (), {"live": lambda self: fed.initial})()
    pieces = {"w": Piece(np.shape(pre), torch.tensor(pre, dtype=torch.float64))}
    object.__setattr__(method, "matching", lambda fed: type("M", (), {"pieces": pieces})())
    return method.w_pre(fed, t)["w"].tensor.numpy() - pre


def alpha(w=ZEROS, t=0, tau=1.0, harden="per_coordinate"):
    method = fedbaf.FedBaF(harden=harden, foundation="x")
    pre = {"w": Piece((P,), torch.zeros(P))}
    drawn = method.a(server(), pre, tau, t, vector(w))["w"].double().numpy()
    return drawn - drawn.mean()


def shared(x=X, seed=1, level=0.15):
    theta = {"encode": torch.zeros(1, x.shape[1]), "decode": torch.zeros(x.shape[1], 1)}  # x_s = x
    found = FedFed(noise=level).share(client(x, seed=seed), Params(theta)).x
    return (found - torch.from_numpy(x.astype(np.float32))).double().numpy().ravel()


CUT, LONG = ZEROS[: P - 400], np.zeros(P + 400)
OTHER = {
    steps: [
        *({"total": x} for x in (bumped(ZEROS), CUT, LONG, ZEROS + 1e-9)),
        *({"start": "t"}, {"t": 2}, {"step": 1}, {"z": 2.0}, {"c": 2.0}, {"n": 51}, {"count": 11}),
    ],
    coins: [{"start": "t"}, {"t": 2, "start": "u"}, {"step": 1}, {"n": 3900}, {"b": 2001}, {"count": 11}],
    mean: [
        *({"x": x} for x in (np.append(2.0**-20, ZEROS[1:]), CUT, LONG)),
        *({"t": 2}, {"number": 2}, {"z": 2.0}, {"c": 2.0}),
    ],
    share: [
        *({"x": x} for x in (np.append(2.0**-20, ZEROS[1:]), CUT, LONG)),
        *({"number": 1}, {"session": "b"}, {"seed": 2}, {"cohort": 9}, {"z": 2.0}),
    ],
    history: [{"first": 1.0}, {"second": 1.0}, {"z": 2.0}, {"size": P - 400}],
    count: [{"norms": (0.2,)}, {"norms": (0.1, 0.1)}, {"norms": (0.1, 9.0)}, {"t": 2}, {"asked": 100.0}],
    sums: [
        *({"x": x} for x in (X[::-1], X[:7], unit_rows(bumped(X) * 2.0), unit_rows(X[:, : P - 400]), np.roll(X, 1, 1))),
        *({"purpose": "c/moments/1"}, {"epsilon": 2.0}, {"key": bytes(32)}),
    ],
    seconds: [{"x": SMALL[:7]}, {"x": SMALL[::-1]}, {"purpose": "d/moments/0"}, {"epsilon": 2.0}],
    pooled: [
        *({"means": bumped(MEANS, 5)}, {"means": bumped(MEANS, MEANS.shape[1] + 5)}, {"means": MEANS[:, : P - 400]}),
        *({"clients": 3}, {"purpose": "sum 1"}, {"epsilon": 2.0}),
    ],
    foundation: [
        *({"pre": x} for x in (bumped(ZEROS), CUT, LONG)),
        *({"harden": "noise_afresh"}, {"w0": 6.0}, {"level": 3.0}),
    ],
    alpha: [{"w": bumped(ZEROS)}, {"t": 1}, {"tau": 0.5}, {"harden": "log_uniform"}],
    shared: [{"x": X[::-1]}, {"x": X[:7]}, {"x": np.append(2 * X[:1], X[1:], 0)}, {"seed": 2}, {"level": 0.3}],
}


@pytest.mark.parametrize("mechanism", OTHER, ids=lambda m: m.__name__)
def test_the_same_noise_never_covers_two_different_numbers(mechanism):
    found = [mechanism(), *(mechanism(**change) for change in OTHER[mechanism])]
    assert np.array_equal(found[0], mechanism())  # a repetition tells nothing new
    for i, a in enumerate(found):
        for j, b in enumerate(found[:i]):
            assert independent(a, b), (i, j, likeness(a, b))


def test_correlated_rounds_share_what_the_strategy_says_and_each_sum_has_a_row_of_its_own():
    m = CorrelatedGaussian(1.0, 1.0, 1e-5, math.inf, 1, hidden=False, rounds=4, period=2)
    weights = m.strategy.inverse()[:3]  # of rounds 3, 2 and 1
    one, two = history(), history(third=1.0)
    share = (weights[1:] @ weights[1:]) / (weights @ weights)
    assert np.corrcoef(one, two)[0, 1] == pytest.approx(share, abs=0.1)
    assert (one - two).std() == pytest.approx(math.sqrt(2), rel=0.1)


def test_noise_that_is_drawn_afresh_differs_by_round():
    a, b = (foundation(harden="noise_afresh", t=t) for t in (0, 1))
    assert independent(a, b)


numbers = st.lists(st.integers(-3, 3), min_size=1, max_size=4)
releases = st.tuples(numbers, st.sampled_from(["a", "b"]), st.sampled_from([1.0, 2.0]), st.booleans())


def covered(given):
    values, purpose, sigma, whole = given
    tile = np.resize(np.array(values, np.int64 if whole else np.float64), P + len(values))
    return noise.cover(KEY, purpose, tile, 2.0**30 * sigma) - tile


@settings(max_examples=60, deadline=None)
@given(releases, releases)
def test_cover_gives_independent_noise_unless_all_is_the_same(one, two):
    a, b = covered(one), covered(two)
    assert np.array_equal(a, b) if one == two else independent(a, b)


def test_equal_numbers_have_one_noise():
    assert np.array_equal(*(noise.cover(KEY, "a", zeros, 1.0) for zeros in (ZEROS, -ZEROS)))


def test_the_property_finds_noise_that_is_shared():
    z = noise.gaussian(KEY, "z", (P,))
    fresh = noise.gaussian(KEY, "y", (P,))
    for other in (z, -3 * z, z[: P - 400], z[400:], np.roll(z, 7), z + 1e-3, np.append(fresh[:900], z[:600])):
        assert not independent(z, other)
    assert independent(z, fresh)


def test_fedpft_releases_once_a_run():
    firsts = {}

    def release_sums(x, plan):
        return fedpft.noisy_sums(client(x, write_once=firsts.setdefault), plan).totals

    plan = Plan("add_remove", "spherical", epsilon=1.0)
    assert torch.equal(release_sums(X, plan), release_sums(X, plan))
    for x, p in ((X[:7], plan), (np.roll(X, 1, 1), plan), (X, dataclasses.replace(plan, epsilon=2.0))):
        with pytest.raises(ClientFault, match="already released"):
            release_sums(x, p)


def test_noise_is_added_in_one_place():
    """A mechanism that draws its own normals could forget what they cover. Correlated rows are bound by a history."""
    source = Path(fedfm.__file__).parent
    uses = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"\bnoise\.gaussian\(|privacy\.noise import [^\n]*\bgaussian\b", path.read_text())
    }
    assert uses == {"aggregation/_correlated.py"}


@pytest.mark.parametrize("mechanism", [CentralGaussian, CorrelatedGaussian])
def test_a_round_that_is_released_again_with_another_sum_is_counted(mechanism):
    more = {"rounds": 4, "period": 2} if mechanism is CorrelatedGaussian else {}
    m, store = mechanism(1.0, 1.0, 1e-5, math.inf, 1, hidden=False, **more), {}

    def release(x, m=m):
        fed = server()
        fed.store = store
        update = m.bound(client(), Update(vector([x]), 1.0))
        m.release(fed, iter([update]), None, 1.0, update.delta.layout)
        return fed.notices

    assert release(0.5) == release(0.5) == []
    assert m.repeat_count(store) == 0
    assert "round 1 was released before" in release(0.25)[0]
    assert release(0.25) == []
    assert m.repeat_count(store) == 1
    if mechanism is CorrelatedGaussian:  # another history costs another run, of sqrt(2) times the sensitivity together
        assert m.sensitivity(5) == pytest.approx(math.sqrt(2) * m.sensitivity(4))
    tight = dataclasses.replace(m, budget=m.epsilon_after(2))
    with pytest.raises(RunError, match="would exceed"):
        release(0.1, tight)
    assert m.repeat_count(store) == 1
