"""Secure aggregation: exact sums with dropouts at every message, what the server sees, and hostile servers."""

import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy import stats

from fedfm.aggregation import _secagg_keys as side
from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.secure import Secure
from fedfm.core.client import Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.messages import Request
from fedfm.core.method import Method
from fedfm.engines.local.engine import LocalLink
from fedfm.errors import Lost, RunError
from fedfm.linalg.params import Params
from fedfm.privacy.crypto import keys, masks
from fedfm.privacy.crypto.fixed_point import FixedPoint
from fedfm.runtime.client import Silos
from fedfm.runtime.client_memory import first
from toy import LINKS, Toys

MESSAGES = ("keys", "share", "hold", "give", "consent", "unmask")


@pytest.fixture(autouse=True)
def _no_power_cut(monkeypatch):
    """What a client keeps is written to the disk at once, which takes most of the time of these tests."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@dataclass(frozen=True)
class Vectors(Method):
    """A mean of vectors that :func:`update_of` makes."""

    rounds: int = 1
    size: int = 40
    scale: float = 1.0
    means: ClassVar = ("give",)

    @on_client
    def give(self, client, t: int) -> Update:
        return update_of(client.id, t, self.size, self.scale)

    def init(self, fed):
        return fed.initial

    def step(self, fed, state, t):
        like = update_of("", 0, self.size, 1.0).delta.layout
        return fed.mean(self.give, like=like, t=t)

    def params_for(self, state, client):
        return state


def update_of(name, t, size, scale):
    """Two tensors, of two dtypes; weights are whole numbers and halves."""
    rng = np.random.default_rng([*name.encode(), t])
    a, b = rng.normal(0, 0.05 * scale, size), rng.normal(0, 2.0, 3)
    delta = Params({"a": torch.from_numpy(a).float(), "b": torch.from_numpy(b)})
    return Update(delta, float(rng.integers(1, 2000)) / 2, {"loss": float(rng.random())})


class Between:
    """A link whose server side may drop, change and read messages.

    Attributes:
        lost: {message: names} whose request does not arrive; ``late``: whose reply does not.
        change: called with each request, returns the one to deliver.
    """

    def __init__(self, link):
        self._link, self.lost, self.late, self.change = link, {}, {}, lambda request: request
        self.sent, self.heard = [], []

    @property
    def clients(self):
        return self._link.clients

    def exchange(self, requests):
        message = requests[0].handler.rpartition("_")[2]
        here = [self.change(r) for r in requests if r.client not in self.lost.get(message, ())]
        self.sent += here
        for reply in self._link.exchange(here) if here else ():
            self.heard.append((message, reply))
            if reply.client not in self.late.get(message, ()):
                yield reply

    def replies(self, message):
        return {reply.client: reply for name, reply in self.heard if name == message}


def names(n):
    return [f"c{i:02d}" for i in range(n)]


def federation(folder, n, aggregator=None, method=None, own=None, **link):
    method, aggregator = method or Vectors(), aggregator or Secure()
    toys = Toys({name: [1.0] for name in names(n)})
    silos = Silos(method, aggregator, toys, memory=folder, own=own)
    LINKS.append(LocalLink(silos, **link))
    fed = Federation(Between(LINKS[-1]), model=toys.model, aggregator=aggregator)
    return fed, fed._link, method


def step(fed, method, t):
    fed.begin(t)
    return method.step(fed, None, t)


def expected(alive, t, method):
    """The weighted mean in float64, by NumPy."""
    updates = [update_of(name, t, method.size, method.scale) for name in alive]
    weights = np.array([u.weight for u in updates])
    return {
        key: np.average([u.delta[key].double().numpy() for u in updates], axis=0, weights=weights) for key in ("a", "b")
    }, float(np.average([u.metrics["loss"] for u in updates], weights=weights))


def agrees(found, alive, t, method):
    mean, _ = expected(alive, t, method)
    for key, value in mean.items():
        assert np.abs(found[key].double().numpy() - value).max() < 1e-7 * max(1, np.abs(value).max())


# --- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
def test_the_mean_its_weight_and_its_metrics(compact, tmp_path):
    fed, _, method = federation(tmp_path, 5, Secure(compact=compact, bound=2e4) if compact else Secure())
    for t in (1, 2, 3):
        found = step(fed, method, t)
        mean, loss = expected(names(5), t, method)
        # The step of the fixed-point numbers, from the docstring, and float32's of the entries of "a".
        error = 5 * (5 * 2e4 / 2**30 if compact else 5 * 2**28 / 2**62) / 2 / (5 * 0.5)
        for key, value in mean.items():
            rounding = 2**-22 if key == "a" else 2**-50
            assert np.abs(found[key].double().numpy() - value).max() <= error + rounding * np.abs(value).max()
        assert fed.metrics["loss"] == pytest.approx(loss, rel=1e-9)
        assert fed.heard == 5
    assert fed.excluded == []


def test_the_error_is_below_a_millionth_of_the_update(tmp_path):
    """Relative root mean square error, with 32 bits an entry and a bound four standard deviations above the updates."""
    method = Vectors(size=20_000)
    fed, _, _ = federation(tmp_path, 5, Secure(compact=True, bound=1000 * 8.0), method)
    found, (mean, _) = step(fed, method, 1), expected(names(5), 1, method)
    off = found["a"].double().numpy() - mean["a"]
    assert np.sqrt((off**2).mean()) < 1e-6 * mean["a"].std()


def test_from_the_second_sum_on_keys_are_not_agreed_again(tmp_path):
    fed, link, method = federation(tmp_path, 4)
    calls = []
    for t in range(1, 19):
        link.heard.clear()
        agrees(step(fed, method, t), names(4), t, method)
        calls.append(len({(reply.round, reply.call) for _, reply in link.heard}))
    assert calls == [5, *[2] * 15, 5, 2]  # 16 sums with the same keys, each one masked message and one unmasking


@pytest.mark.parametrize("way", ["lost", "late"])
@pytest.mark.parametrize("n", [3, 5, 10])
def test_dropouts_at_every_message(n, way, tmp_path):
    """Gate K6 of the campaign: up to n - t clients, at each message; the next sum is complete again."""
    rng, least = np.random.default_rng(n), n // 2 + 1
    for message, drops in itertools.product(MESSAGES, {1, n - least} if n == 10 else range(1, n - least + 1)):
        if n - drops < 3 and message in ("keys", "share"):  # refused below
            continue
        fed, link, method = federation(tmp_path / f"{message}{drops}", n)
        if rng.random() < 0.5:  # also of a sum with keys that were agreed before
            step(fed, method, 1)
            fed.process_memory["SecAgg"].broken = message in ("keys", "share", "hold")
        gone = {str(name) for name in rng.choice(names(n), drops, replace=False)}
        getattr(link, way)[message] = gone
        after = message in ("consent", "unmask")
        alive = names(n) if after else sorted(set(names(n)) - gone)
        agrees(step(fed, method, 2), alive, 2, method)
        assert fed.heard == len(alive)
        assert {e.client for e in fed.excluded} == gone
        getattr(link, way).clear()
        agrees(step(fed, method, 3), names(n), 3, method)


def test_dropouts_at_several_messages_of_one_sum(tmp_path):
    fed, link, method = federation(tmp_path, 10)
    link.lost = {"keys": {"c01"}, "share": {"c02"}, "give": {"c03"}, "unmask": {"c04"}}
    agrees(step(fed, method, 1), [c for c in names(10) if c not in ("c01", "c02", "c03")], 1, method)


@pytest.mark.parametrize(
    ("message", "drops", "reason"),
    [
        ("keys", 3, "2 clients sent keys, a sum that hides them needs 3"),
        ("give", 3, "2 clients sent a masked update, a sum that hides them needs 3"),
        ("unmask", 3, r"the masks of c0. stay in the sum: 2 shares came, 3 are needed"),
        ("consent", 3, "0 of 2 clients gave a valid reply to aggregate.SecAgg_unmask"),
    ],
)
def test_below_the_threshold_there_is_no_sum(message, drops, reason, tmp_path):
    fed, link, method = federation(tmp_path, 5)
    link.lost[message] = set(names(5)[:drops])
    with pytest.raises(RunError, match=f"round 1: {reason}"):
        step(fed, method, 1)


def test_a_sparse_graph(tmp_path):
    """24 clients with 8 neighbours each; three drop out."""
    fed, link, method = federation(tmp_path, 24, Secure(neighbours=8))
    link.late["give"], link.lost["unmask"] = {"c03", "c10"}, {"c20"}
    agrees(step(fed, method, 1), sorted(set(names(24)) - {"c03", "c10"}), 1, method)
    sent = [len(r.payload["names"]) for r in link.sent if r.handler.endswith("_share")]
    assert sent == [8] * 24


@pytest.mark.parametrize(("n", "d"), [(3, 2), (5, 4), (20, 19), (64, 24), (1000, 40)])
def test_the_graph_has_log_n_neighbours_and_is_symmetric(n, d):
    assert side.degree(0, n) == d
    found = [set(side.neighbours_of(at, n, d)) for at in range(n)]
    assert {len(others) for others in found} == {d}
    assert all(at in found[other] and other != at for at in range(n) for other in found[at])
    reached, new = {0}, {0}
    while new:
        new = set().union(*(found[at] for at in new)) - reached
        reached |= new
    assert len(reached) == n


def test_two_clients_are_too_few(tmp_path):
    fed, _, method = federation(tmp_path, 2)
    with pytest.raises(RunError, match="2 clients sent keys, a sum that hides them needs 3"):
        step(fed, method, 1)


def test_an_update_above_the_bound_is_refused_by_its_client(tmp_path):
    fed, _, method = federation(tmp_path, 4, Secure(bound=1.5 * 2000 * 2))
    protect = type(fed.aggregator.transport).protect

    def large(self, client, update):
        factor = 1e6 if client.id == "c01" else 1.0
        return protect(self, client, replace(update, delta=update.delta * factor))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(fed.aggregator.transport), "protect", large)
        found = step(fed, method, 1)
    assert [(e.client, e.code) for e in fed.excluded] == [("c01", "E_NORM")]
    assert "an entry times its weight is" in fed.excluded[0].reason
    agrees(found, ["c00", "c02", "c03"], 1, method)


def test_clipping_is_done_by_the_clients(tmp_path):
    """x_k min(1, C / ||x_k||) with the weights as they were."""
    fed, _, method = federation(tmp_path, 4, Secure(clip_norm=0.5))
    found, updates = step(fed, method, 1), [update_of(name, 1, 40, 1.0) for name in names(4)]
    assert sum(u.delta.norm() > 0.5 for u in updates) >= 2
    weights = [u.weight for u in updates]
    clipped = [u.delta["b"].numpy() * min(1, 0.5 / u.delta.norm()) for u in updates]
    assert np.abs(found["b"].numpy() - np.average(clipped, axis=0, weights=weights)).max() < 1e-9


# --- what the server sees --------------------------------------------------------------------------------------------


def test_a_masked_vector_looks_uniform_and_no_two_are_alike(tmp_path):
    method = Vectors(size=60_000, scale=0.0)  # equal updates, of zeros: every bit that is seen is the masks'
    seen = []
    for run in range(2):
        fed, link, _ = federation(tmp_path / str(run), 3, method=method)
        for t in (1, 2):
            link.heard.clear()
            step(fed, method, t)
            seen += [(reply.value.head, reply.value.body) for reply in link.replies("give").values()]
    for head, body in seen:
        counts = np.bincount(body.numpy().view(np.uint8), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-6
        assert (head.abs() > 1 << 32).all()  # of 24 words each is small with probability 2^-31
    for (_, a), (_, b) in itertools.combinations(seen, 2):
        assert not (a == b).any()
        for combined in (a - b, a + b):  # no two share a mask
            assert stats.chisquare(np.bincount(combined.numpy().view(np.uint8), minlength=256)).pvalue > 1e-6


def test_no_message_but_the_masked_one_depends_on_the_update(tmp_path):
    """Two runs with the same entropy and other updates differ in the train replies alone."""
    heard = []
    for scale in (1.0, 3.0):
        stream = np.random.default_rng(5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(keys, "entropy", lambda n, stream=stream: stream.bytes(n))
            patch.setattr("fedfm.runtime.client_memory.entropy", lambda n, stream=stream: stream.bytes(n))
            patch.setattr("random.SystemRandom", lambda: __import__("random").Random(1))
            fed, link, method = federation(tmp_path / str(scale), 4, method=Vectors(scale=scale))
            step(fed, method, 1)
        heard.append({(name, r.client): r.value for name, r in link.heard})
    a, b = heard
    assert a.keys() == b.keys()
    for key in a:
        if key[0] == "give":
            assert not torch.equal(a[key].body, b[key].body)
        else:
            assert a[key] is b[key] is None or torch.equal(a[key], b[key])
    forms = {(c.handler.rpartition("_")[2], c.form) for c in fed.transcript.pending if c.receiver == "server"}
    assert forms == {(m, "masked" if m == "give" else "plain") for m in MESSAGES if m != "hold"} | {("hold", "plain")}


def test_all_that_the_server_learns_leaves_a_masked_vector_masked(tmp_path):
    """The server takes off every mask that it can compute: two clients of three are left with their shared mask."""
    fed, link, method = federation(tmp_path, 3)
    step(fed, method, 1)
    session, sent = fed.process_memory["SecAgg"], link.replies("give")
    shares = {c: r.value for c, r in link.replies("unmask").items()}
    n, rows = 3, {c: session.holds(c) for c in shares}
    left = {}
    for name in names(3):
        points = {
            x: int.from_bytes(side.bytes_of(shares[h][rows[h].index(name)]), "little")
            for x, h in enumerate(session.holders(name), 1)
        }
        seed = side.shamir.combine(points, session.threshold).to_bytes(32, "little")
        head, body = sent[name].value.head.numpy().view("u8").copy(), sent[name].value.body.numpy().view("u8").copy()
        masks.add((head, body), side.self_mask(seed, session.name, 0), negative=True)
        left[name] = body
        code = FixedPoint(64, Secure().bound, n)
        update = update_of(name, 1, 40, 1.0)
        plain = np.concatenate([code.encode(f.numpy(), update.weight) for f in update.delta.flats.values()])
        assert not (body == plain).any()
    updates = [update_of(name, 1, 40, 1.0) for name in names(3)]
    summed = sum(u.weight * u.delta["a"].double().numpy() for u in updates)
    assert np.abs(code.decode(sum(left.values()))[:40] - summed).max() < 1e-6


# --- hostile servers -------------------------------------------------------------------------------------------------


def refusals(fed, link, method, t=1):
    """What the clients answer to a server that goes on as far as it gets."""
    with pytest.raises(RunError):
        step(fed, method, t)
    return [str(reply.fault.reason) for _, reply in link.heard if reply.fault is not None]


def changed(message, client=None, **values):
    """Change one message's payload, for one client or all; a callable makes the value of the old one."""

    def change(request):
        if not request.handler.endswith("_" + message) or (client and request.client != client):
            return request
        new = {k: v(request.payload[k]) if callable(v) else v for k, v in values.items()}
        return request._replace(payload={**request.payload, **new})

    return change


def test_one_client_named_both_alive_and_dead_is_revealed_by_nobody(tmp_path):
    """Half of the clients hear that c00 survived, the others that it did not."""
    fed, link, method = federation(tmp_path, 5)

    def split(request):
        if not request.handler.endswith("_consent") or request.client in ("c00", "c01", "c02"):
            return request
        alive = request.payload["alive"].clone()
        alive[fed.process_memory["SecAgg"].positions["c00"]] = 0
        return request._replace(payload={**request.payload, "alive": alive})

    link.change = split
    found = refusals(fed, link, method)
    other, dead = "signed another list of survivors", "c00 is no neighbour that survived"
    assert sum(other in reason or dead in reason for reason in found) == len(link.replies("unmask")) == 5


def test_a_second_list_of_survivors_and_a_second_reveal_are_refused(tmp_path):
    """After an honest sum the server asks for the other share of c00, in every way it has."""
    fed, link, method = federation(tmp_path, 5)
    step(fed, method, 1)
    session = fed.process_memory["SecAgg"]
    (consent,) = [r for r in link.sent if r.handler.endswith("_consent") and r.client == "c01"]
    (unmask,) = [r for r in link.sent if r.handler.endswith("_unmask") and r.client == "c01"]
    alive = consent.payload["alive"].clone()
    alive[session.positions["c00"]] = 0
    other = consent._replace(payload={**consent.payload, "alive": alive})
    for call in (consent.call, unmask.call, unmask.call + 1, 99):  # also to the memories of earlier messages
        for request in (consent, other, unmask):
            (reply,) = link.exchange([request._replace(call=call)])
            assert reply.fault is not None, (call, request.handler)
            assert reply.fault.code == "E_REFUSED"
    reasons = {reply.fault.reason for _, reply in link.heard if reply.fault is not None}
    assert any("a list of survivors again" in reason for reason in reasons)
    assert any("shares again" in reason for reason in reasons)


def test_a_replayed_round_gets_no_second_vector_with_the_same_masks(tmp_path):
    fed, link, method = federation(tmp_path, 4)
    step(fed, method, 1)
    give = [r for r in link.sent if r.handler.endswith("_give")]
    for request in give:
        (reply,) = link.exchange([request._replace(payload={"t": 2})])
        assert reply.fault.reason.startswith("secure aggregation: sum 0: a masked update again")
    share = [r for r in link.sent if r.handler.endswith("_share")]
    for request in share:
        (reply,) = link.exchange([request])
        assert "shares of seeds again" in reply.fault.reason


def test_a_server_in_the_middle_is_found(tmp_path):
    """It replaces one client's keys by its own: unsigned, signed by itself at first contact, and later."""
    own = keys.entropy(32)

    def forged(session, terms, name, sign):
        data = side.OwnKeys(keys.entropy(32), 16).public()
        return side.packed(keys.identity_of(own) + data + sign(own, side._LABEL, terms, session, "keys", name, data))

    def change(request, sign):
        if not request.handler.endswith("_share") or "c00" not in request.payload["names"]:
            return request
        session = next(r.payload["session"] for r in reversed(link.sent) if r.handler.endswith("_keys"))
        rows = request.payload["published"].clone()
        rows[request.payload["names"].index("c00")] = forged(session, fed.aggregator.transport._terms, "c00", sign)
        return request._replace(payload={**request.payload, "published": rows})

    fed, link, method = federation(tmp_path / "a", 4)
    link.change = lambda request: change(request, lambda *what: bytes(64))
    assert sum("the keys of c00 are not signed by it" in r for r in refusals(fed, link, method)) == 3
    fed, link, method = federation(tmp_path / "b", 4)
    step(fed, method, 1)
    fed.process_memory.clear()
    link.change = lambda request: change(request, keys.sign)
    assert sum("c00 has another identity than before" in r for r in refusals(fed, link, method, 2)) == 3


def test_replayed_keys_of_an_earlier_agreement_are_refused(tmp_path):
    fed, link, method = federation(tmp_path, 4)
    step(fed, method, 1)
    old = {r.client: r.payload["published"] for r in link.sent if r.handler.endswith("_share")}
    order = {r.client: r.payload["names"] for r in link.sent if r.handler.endswith("_share")}
    fed.process_memory.clear()

    def replay(request):
        if not request.handler.endswith("_share"):
            return request
        at = [order[request.client].index(name) for name in request.payload["names"]]
        return request._replace(payload={**request.payload, "published": old[request.client][at]})

    link.change = replay
    assert sum("not signed by it for this agreement" in r for r in refusals(fed, link, method, 2)) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed("share", n=2), "a sum of 2 clients, expected 3 at least"),
        (changed("share", n=4), "neighbours at position"),
        (changed("share", at=7), "neighbours at position 7 of 5"),
        (changed("share", names=lambda names: [names[0]] * 4), "expected 4 others"),
        (changed("keys", sums=0), "keys for 0 sums"),
        (changed("keys", "c01", session="x"), "not signed by it for this agreement"),
        (changed("hold", present=lambda p: p[:1], sealed=lambda s: s[:1]), "shares of 1 neighbours came, 2 are needed"),
        (changed("hold", sealed=lambda s: s.flip(0)), "do not fit their key and context"),
        (changed("consent", alive=lambda a: a * 0), "a list of survivors that is not one"),
        (changed("consent", alive=lambda a: a * 2), "a list of survivors that is not one"),
        (changed("consent", sum=1), "a list of survivors that is not one"),
        (changed("unmask", names=[], signatures=torch.empty(0, 64, dtype=torch.uint8)), "1 signatures of the"),
        (changed("unmask", sum=3), "shares of a sum whose survivors"),
        (changed("unmask", signatures=lambda s: s.flip(0)), "signed another list of survivors"),
        (changed("unmask", names=lambda n: ["nobody", *n[1:]]), "nobody is no neighbour"),
    ],
)
def test_messages_that_no_honest_server_sends(change, reason, tmp_path):
    fed, link, method = federation(tmp_path, 5)
    link.change = change
    assert any(reason in found for found in refusals(fed, link, method))


def test_a_small_sum_is_refused_by_the_clients(tmp_path):
    """The server names two survivors of five, although its own check would stop it."""
    fed, link, method = federation(tmp_path, 5)
    two = lambda alive: torch.tensor([int(i < 2) for i in range(5)], dtype=torch.uint8)  # noqa: E731
    link.change = changed("consent", alive=two)
    found = refusals(fed, link, method)
    assert sum("a sum of 2 clients, expected 3 at least" in reason for reason in found) == 2
    assert len(found) == 5


def test_swapped_positions_are_found(tmp_path):
    """Clients that see one another at other positions would read one list of survivors in two ways."""
    fed, link, method = federation(tmp_path, 5)

    def swap(request):
        if not request.handler.endswith("_share") or request.client != "c01":
            return request
        names, rows = list(request.payload["names"]), request.payload["published"].clone()
        names[0], names[1] = names[1], names[0]
        rows[[0, 1]] = rows[[1, 0]]
        return request._replace(payload={**request.payload, "names": names, "published": rows})

    link.change = swap
    step_failed = False
    try:
        step(fed, method, 1)
    except RunError:
        step_failed = True
    reasons = [reply.fault.reason for _, reply in link.heard if reply.fault is not None]
    assert step_failed or "c01" in {e.client for e in fed.excluded}
    assert any("do not fit their key and context" in reason for reason in reasons)


# --- lying clients ---------------------------------------------------------------------------------------------------


def test_a_wrong_share_ends_the_round_and_names_whose_masks_stay(tmp_path):
    for drops in ((), ("c04",), ("c03", "c04")):  # with more shares than needed, and with exactly as many
        fed, link, method = federation(tmp_path / str(len(drops)), 5)
        link.lost["unmask"] = set(drops)
        honest = link.exchange

        def lying(requests, honest=honest):
            for reply in honest(requests):
                if requests[0].handler.endswith("_unmask") and reply.client == "c00":
                    reply = reply._replace(value=reply.value ^ 1)
                yield reply

        link.exchange = lying
        with pytest.raises(RunError, match=r"the masks of c0. stay in the sum: a share is wrong"):
            step(fed, method, 1)


def test_plain_aggregation_gives_the_same_mean(tmp_path):
    secure, plain = (federation(tmp_path / str(i), 4, a) for i, a in enumerate((Secure(), Aggregator())))
    a, b = step(secure[0], secure[2], 1), step(plain[0], plain[2], 1)
    assert (a - b).norm() < 1e-6 * b.norm()
    assert secure[0].metrics.keys() == plain[0].metrics.keys()


# --- what a silo keeps and allows --------------------------------------------------------------------------------


def test_a_silo_that_allows_no_mean_takes_no_part(tmp_path):
    request = Request("a", "aggregate.SecAgg_keys", {"session": "s", "sums": 1}, 1, 1)
    for allow in (("mean",), ("reply", "scores", "reveal")):
        silos = Silos(Vectors(), Secure(), Toys({"a": [1.0]}), memory=tmp_path / str(len(allow)), allow=allow)
        (value,) = silos.answer([request])
        assert (getattr(value, "code", None) == "E_REFUSED") is (allow != ("mean",))


def test_the_first_value_of_a_name_stays(tmp_path):
    assert first(tmp_path, "a", "x", b"1") == b"1"
    assert first(tmp_path, "a", "x", b"2") == b"1"
    assert first(tmp_path, "b", "x", b"2") == b"2"
    (path,) = tmp_path.glob("*/a/x")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Lost, match="damaged"):
        first(tmp_path, "a", "x", b"1")


def test_one_of_many_processes_is_first(tmp_path):
    with ProcessPoolExecutor(4) as pool:
        found = list(pool.map(first, *zip(*[(tmp_path, "a", "x", bytes([i])) for i in range(40)], strict=True)))
    assert len(set(found)) == 1
