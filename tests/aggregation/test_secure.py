"""Secure aggregation: exact sums with dropouts at every message, and what an honest server sees."""

import itertools
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from masked_sums import MESSAGES, Vectors, agrees, expected, federation, names, step, update_of
from scipy import stats

from fedfm.aggregation import _secagg_keys as side
from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.secure import Secure
from fedfm.core.messages import Request
from fedfm.errors import Lost, RunError
from fedfm.privacy.crypto import keys, masks, shamir
from fedfm.privacy.crypto.fixed_point import FixedPoint
from fedfm.runtime.client import Silos
from fedfm.runtime.client_memory import first
from toy import Toys

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


@pytest.mark.parametrize(("bound", "told"), [(1000 * 8.0, False), (2.0**28, True)])
def test_a_coarse_sum_is_reported_once_with_its_error(bound, told, tmp_path):
    method = Vectors(size=20_000)
    fed, _, _ = federation(tmp_path, 5, Secure(compact=True, bound=bound), method)
    found, (mean, _) = step(fed, method, 1), expected(names(5), 1, method)
    off = found["a"].double().numpy() - mean["a"]
    share = math.sqrt((off**2).mean() / (mean["a"] ** 2).mean())
    texts = [text for text in fed.notices if "compact" in text]
    step(fed, method, 2)
    assert not any("compact" in text for text in fed.notices)
    if not told:
        assert share < 1e-6
        assert texts == []
    else:
        (text,) = texts
        assert float(text.partition(" by ")[2].partition(" of it")[0]) == pytest.approx(share, rel=0.5)


def test_from_the_second_sum_on_keys_are_not_agreed_again(tmp_path):
    fed, link, method = federation(tmp_path, 4)
    calls = []
    for t in range(1, 19):
        link.heard.clear()
        agrees(step(fed, method, t), names(4), t, method)
        calls.append(len({(reply.round, reply.call) for _, reply in link.heard}))
    assert calls == [5, *[2] * 15, 5, 2]  # 16 sums with the same keys, each one masked message and one unmasking


@pytest.mark.parametrize("n", [5, 10])
def test_sampled_cohorts_use_the_keys_of_all(n, tmp_path):
    """Half of the clients a round, among whom the masks are; keys are agreed once, all others help to unmask."""
    method = Vectors(fraction=0.6)
    fed, link, _ = federation(tmp_path, n, method=method)
    calls, cohorts = [], set()
    for t in range(1, 9):
        link.heard.clear()
        found = step(fed, method, t)
        assert len(fed.cohort) == int(0.6 * n)
        cohorts.add(fed.cohort)
        agrees(found, fed.cohort, t, method)
        assert link.replies("give").keys() == set(fed.cohort)
        assert link.replies("unmask").keys() == set(names(n))
        calls.append(len({(reply.round, reply.call) for _, reply in link.heard}))
    assert calls == [5, *[2] * 7]
    assert len(cohorts) > 1


def test_a_sampled_client_drops_out(tmp_path):
    method = Vectors(fraction=0.5)
    fed, link, _ = federation(tmp_path, 10, method=method)
    step(fed, method, 1)
    fed.begin(2)
    gone = fed.sample(0.5)[1]
    link.late["give"] = {gone}
    found = method.step(fed, None, 2)
    agrees(found, [c for c in fed.cohort if c != gone], 2, method)
    assert fed.heard == 4


def test_a_small_sampled_cohort_of_many_members_loses_a_client(tmp_path):
    """Most members keep no shares of such a cohort, so they are not asked for consent."""
    method = Vectors(fraction=0.05)
    fed, link, _ = federation(tmp_path, 100, Secure(neighbours=10), method=method)
    step(fed, method, 1)
    fed.begin(2)
    gone = fed.sample(0.05)[1]
    link.late["give"] = {gone}
    agrees(method.step(fed, None, 2), [c for c in fed.cohort if c != gone], 2, method)
    status = bytes(side.OUT if c not in fed.cohort else side.ALIVE for c in names(100))
    agreed = side.Agreed("", "", names(100), torch.zeros(100, 1, dtype=torch.uint8), 10)
    held = {p for at, s in enumerate(status) if s != side.OUT for p in (at, *agreed.around(at))}
    assert agreed.count_holders(status) == len(held) < 67


@pytest.mark.sample("3-0.5-lost", "5-0.67-lost")
@pytest.mark.each_value
@pytest.mark.parametrize("way", ["lost", "late"])
@pytest.mark.parametrize(("n", "threshold"), [(3, 0.5), (5, 0.5), (5, 0.67), (10, 0.67)])
def test_dropouts_at_every_message(n, threshold, way, tmp_path):
    """Gate K6, the short form of benchmarks/secagg_gate.py: up to n - t clients; the next sum is complete again."""
    rng, least = np.random.default_rng(n), int(threshold * n) + 1
    for message, drops in itertools.product(MESSAGES, [n - least] if n == 10 else range(1, n - least + 1)):
        if n - drops < 3 and message in ("keys", "share"):  # refused below
            continue
        fed, link, method = federation(tmp_path / f"{message}{drops}", n, Secure(threshold=threshold))
        if rng.random() < 0.5:  # also of a sum with keys that were agreed before
            step(fed, method, 1)
            fed.process_memory["SecAgg"].broken = message in ("keys", "share", "hold")
        gone = [str(name) for name in rng.choice(names(n), drops, replace=False)]
        dead = set(gone[:1]) if message == "consent" else set()  # otherwise nobody's consent is needed
        getattr(link, way).update({"give": dead, message: set(gone) - dead})
        alive = sorted(set(names(n)) - (dead or (set() if message == "unmask" else set(gone))))
        agrees(step(fed, method, 2), alive, 2, method)
        assert fed.heard == len(alive)
        assert {e.client for e in fed.excluded} == set(gone)
        getattr(link, way).clear()
        agrees(step(fed, method, 3), names(n), 3, method)


def test_dropouts_at_several_messages_of_one_sum(tmp_path):
    fed, link, method = federation(tmp_path, 10)
    link.lost = {"keys": {"c01"}, "share": {"c02"}, "give": {"c03"}, "consent": {"c04"}, "unmask": {"c05"}}
    with pytest.raises(RunError, match="0 of 6 clients gave a valid reply"):
        step(fed, method, 1)
    link.lost = {"keys": {"c01"}, "give": {"c03"}, "unmask": {"c04"}}
    agrees(step(fed, method, 2), [c for c in names(10) if c not in ("c01", "c03")], 2, method)


@pytest.mark.parametrize(
    ("message", "drops", "threshold", "reason"),
    [
        ("keys", 3, 0.5, "2 clients sent keys, but a sum that hides them needs 3"),
        ("give", 3, 0.5, "2 clients sent a masked update, but a sum that hides them needs 3"),
        ("give", 2, 0.67, "3 clients sent a masked update, but a sum that hides them needs 4"),
        ("unmask", 3, 0.5, r"the masks of c0. stay in the sum: 2 shares arrived, 3 are needed"),
        ("unmask", 2, 0.67, r"the masks of c0. stay in the sum: 3 shares arrived, 4 are needed"),
        ("consent", 2, 0.5, "0 of 2 clients gave a valid reply to aggregate.SecAgg_unmask"),
    ],
)
def test_below_the_threshold_there_is_no_sum(message, drops, threshold, reason, tmp_path):
    fed, link, method = federation(tmp_path, 5, Secure(threshold=threshold))
    link.lost = {"give": {"c04"} if message == "consent" else set(), message: set(names(5)[:drops])}
    with pytest.raises(RunError, match=f"round 1: {reason}"):
        step(fed, method, 1)


def test_a_sparse_graph(tmp_path):
    """24 clients with 8 neighbours each; three drop out, and then a cohort of 12."""
    fed, link, method = federation(tmp_path, 24, Secure(neighbours=8, threshold=0.5))
    link.late["give"], link.lost["unmask"] = {"c03", "c10"}, {"c20"}
    agrees(step(fed, method, 1), sorted(set(names(24)) - {"c03", "c10"}), 1, method)
    assert {len(held) for held in fed.process_memory["SecAgg"].shares_at.values()} == {9}
    link.late.clear(), link.lost.clear()
    half = replace(method, fraction=0.5)
    for t in (2, 3):
        agrees(step(fed, half, t), fed.cohort, t, method)


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
    with pytest.raises(RunError, match="2 clients are asked, but a sum that hides them needs 3"):
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
            fed, link, method = federation(tmp_path / str(scale), 4, method=Vectors(scale=scale))
            step(fed, method, 1)
        heard.append({(name, r.client): r.value for name, r in link.heard})
    a, b = heard
    assert a.keys() == b.keys()
    for key in a:
        if key[0] == "give":
            assert not torch.equal(a[key].body, b[key].body)
            assert torch.equal(a[key].seal, b[key].seal)
        else:
            assert a[key] is b[key] is None or torch.equal(a[key], b[key])
    forms = {(c.handler.rpartition("_")[2], c.form) for c in fed.transcript.pending if c.receiver == "server"}
    assert forms == {(m, "masked" if m == "give" else "plain") for m in MESSAGES if m != "consent"}


def test_all_that_the_server_learns_leaves_a_masked_vector_masked(tmp_path):
    """The server takes off every mask that it can compute: two clients of three are left with their shared mask."""
    fed, link, method = federation(tmp_path, 3)
    step(fed, method, 1)
    session, sent = fed.process_memory["SecAgg"], link.replies("give")
    shares = {c: r.value for c, r in link.replies("unmask").items()}
    left, (tell, *_) = {}, [r.payload["+told"] for r in link.sent if r.handler.endswith("_give")]
    for p, name in enumerate(names(3)):
        points = {
            x: int.from_bytes(side.bytes_of(shares[names(3)[h]][session.holds[h].index(p)]), "little")
            for x, h in enumerate(session.shares_at[p], 1)
        }
        seed = shamir.combine(points, session.threshold).to_bytes(32, "little")
        head, body = sent[name].value.head.numpy().view("u8").copy(), sent[name].value.body.numpy().view("u8").copy()
        context = session.agreement.context(0, side.bytes_of(tell.cohort), side.bytes_of(sent[name].value.seal)[:32])
        masks.add((head, body), side.self_mask(seed, context), negative=True)
        left[name] = body
        code = FixedPoint(64, Secure().bound, 3)
        update = update_of(name, 1, 40, 1.0)
        plain = np.concatenate([code.encode(f.numpy(), update.weight) for f in update.delta.flats.values()])
        assert not (body == plain).any()
    updates = [update_of(name, 1, 40, 1.0) for name in names(3)]
    summed = sum(u.weight * u.delta["a"].double().numpy() for u in updates)
    assert np.abs(code.decode(sum(left.values()))[:40] - summed).max() < 1e-6


def test_plain_aggregation_gives_the_same_mean(tmp_path):
    secure, plain = (federation(tmp_path / str(i), 4, a) for i, a in enumerate((Secure(), Aggregator())))
    a, b = step(secure[0], secure[2], 1), step(plain[0], plain[2], 1)
    assert (a - b).norm() < 1e-6 * b.norm()
    assert secure[0].metrics.keys() == plain[0].metrics.keys()


# --- what a silo keeps and allows --------------------------------------------------------------------------------


def test_a_silo_that_allows_no_mean_takes_no_part(tmp_path):
    request = Request("a", "aggregate.SecAgg_keys", {"session": "s"}, 1, 1)
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
