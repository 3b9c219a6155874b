"""FedBip against numbers worked by hand, and its limits: orthogonal, opposed, identical and zero task vectors."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedfm
import tiny_text
from fedfm.aggregation.base import Aggregator
from fedfm.api import predict
from fedfm.config.experiment import Experiment
from fedfm.core.client import Update
from fedfm.core.federation import Federation
from fedfm.engines.local.engine import LocalLink
from fedfm.errors import InputError, RunError
from fedfm.linalg.mapped_files import location_of
from fedfm.linalg.out_of_core import keep_all
from fedfm.linalg.pairwise import gram, mix
from fedfm.linalg.params import Params
from fedfm.methods.fedbip.fedbip import BipState, FedBip, cap_factors, copies, shares, similarities
from fedfm.methods.fedbip.task_vectors import Change, Entries, Products
from fedfm.models.adapters import lora
from fedfm.models.spec import AdaptationSpec
from fedfm.runtime import predictions
from fedfm.runtime.client import Silos
from fedfm.runtime.evaluation import Evaluation
from fedfm.runtime.population import populate
from fedfm.training import SGD
from fedfm.training.personal import DittoOptimiser
from toy import Quadratic, federation, run

TAU = [Params({"x": torch.tensor([a, b])}) for a, b in ((3.0, 0.0), (3.0, 4.0), (0.0, -2.0))]
ALL = [("x",)]


def p_of(vectors, negative, kind="cosine", layers=ALL):
    g, counts = similarities(gram(vectors, layers, centre=kind == "pearson"), kind)
    return shares(g, counts, negative)


def test_cosines_of_three_vectors():
    g, _ = similarities(gram(TAU), "cosine")
    np.testing.assert_allclose(g[0], [[1, 0.6, 0], [0.6, 1, -0.8], [0, -0.8, 1]], atol=1e-7)


def test_raw_weights_and_their_updates():
    p = p_of(TAU, "raw")
    np.testing.assert_allclose(p[0], [[0.625, 0.375, 0], [0.75, 1.25, -1], [0, -4, 5]], atol=1e-6)
    updates = torch.stack([u["x"] for u in mix(p, TAU)])
    np.testing.assert_allclose(updates, [[3, 1.5], [6, 7], [-12, -26]], atol=1e-5)


def test_clipped_weights_and_their_updates():
    p = p_of(TAU, "clip")
    np.testing.assert_allclose(p[0], [[0.625, 0.375, 0], [0.375, 0.625, 0], [0, 0, 1]], atol=1e-7)
    np.testing.assert_allclose(torch.stack([u["x"] for u in mix(p, TAU)]), [[3, 1.5], [3, 2.5], [0, -2]], atol=1e-6)


def test_a_coordinate_a_layer():
    vectors = [Params({"x": t["x"][:1], "y": t["x"][1:]}) for t in TAU]
    layers = [("x",), ("y",)]
    updates = mix(p_of(vectors, "clip", layers=layers), vectors, layers)
    np.testing.assert_allclose([[float(u["x"]), float(u["y"])] for u in updates], [[3, 0], [3, 4], [0, -2]], atol=1e-6)
    assert np.isnan(p_of(vectors, "raw", layers=layers)).any()  # 4 and -2: similarities 1 and -1 sum to 0


def test_three_vectors_that_cancel_have_no_raw_weights():
    angle = torch.arange(3) * (2 * torch.pi / 3)
    vectors = [Params({"x": torch.stack([torch.cos(a), torch.sin(a)])}) for a in angle]
    assert np.isnan(p_of(vectors, "raw")).all()
    np.testing.assert_allclose(p_of(vectors, "clip")[0], np.eye(3), atol=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "l2", "pearson"])
@pytest.mark.parametrize("negative", ["clip", "raw", "softmax"])
def test_a_zero_vector_has_only_itself(kind, negative):
    p = p_of([*TAU, Params({"x": torch.zeros(2)})], negative, kind)[0]
    np.testing.assert_array_equal(p[3], [0, 0, 0, 1])
    np.testing.assert_array_equal(np.nan_to_num(p[:3, 3]), 0)


def test_pearson_is_the_correlation():
    draw = np.random.default_rng(0).normal(1, 1, (4, 50)).astype(np.float32)
    g, _ = similarities(gram([Params({"x": torch.from_numpy(v)}) for v in draw], centre=True), "pearson")
    np.testing.assert_allclose(g[0], np.corrcoef(draw), atol=1e-6)


def test_l2_by_the_median_distance():
    # Distances 4 (0, 1), sqrt(13) (0, 2), sqrt(45) (1, 2); their median is 4.
    g, _ = similarities(gram(TAU), "l2")
    np.testing.assert_allclose(g[0, 0], [1, 0.5, 1 / (1 + np.sqrt(13) / 4)], atol=1e-6)
    np.testing.assert_allclose(g[0, 1, 2], 1 / (1 + np.sqrt(45) / 4), atol=1e-6)


def test_softmax_at_its_temperature():
    g, counts = similarities(gram(TAU), "cosine")
    expected = torch.softmax(torch.from_numpy(g) / 0.3, 2)
    np.testing.assert_allclose(shares(g, counts, "softmax", 0.3), expected, atol=1e-9)


def test_copies_are_found_and_zeros_are_none():
    zero = Params({"x": torch.zeros(2)})
    assert list(copies({"a": TAU[0], "b": TAU[0] + zero, "c": TAU[1], "d": zero, "e": zero})) == [("b", "a")]


def test_a_norm_above_the_cap_is_cut():
    assert cap_factors(np.array([9.0, 25.0, 200.0**2]), 3.0).tolist() == pytest.approx(
        [1, 1, 15 / 200]
    )  # median norm 5


# --- rounds: full batches and learning rate 1 jump to the client's own mean -----------------------------------------
JUMP = SGD(learning_rate=1.0, batch_size=8)
ROWS = {"a": [3.0], "b": [5.0], "c": [-1.0]}  # from 1: tau = 2, 4, -2


def values(state, of):
    return [float(getattr(state, of)[c]["w"]) for c in ROWS]


def test_a_round(tmp_path):
    method = FedBip(local=JUMP)
    states = run(method, federation(method, ROWS, tmp_path), 2)
    assert values(states[1], "theta") == [3, 5, -1]
    assert values(states[1], "theta_bar") == pytest.approx([4, 4, -1])  # in one dimension cosines are 1 or -1
    assert [float(w["w"]) for w in method.start_models(states[1]).values()] == [1, 1, 1]
    # From 4, 4, -1: tau = -1, 1, 0; opposed vectors and a zero one: everybody alone.
    assert values(states[2], "theta") == [3, 5, -1]
    assert values(states[2], "theta_bar") == pytest.approx([3, 5, -1])


def test_parameters_instead_of_task_vectors(tmp_path):
    method = FedBip(local=JUMP, aggregate="parameters")
    state = run(method, federation(method, ROWS, tmp_path), 1)[1]
    assert values(state, "theta_bar") == pytest.approx([4, 4, -1])  # (3 + 5) / 2
    method = FedBip(local=JUMP, weights_from="parameters")
    state = run(method, federation(method, ROWS, tmp_path / "w"), 1)[1]
    assert values(state, "theta_bar") == pytest.approx([4, 4, -1])  # of 3, 5, -1 the signs are those of tau


def test_one_client_is_local_training(tmp_path):
    method = FedBip(local=JUMP)
    states = run(method, federation(method, {"a": [3.0]}, tmp_path), 2)
    assert float(states[2].theta_bar["a"]["w"]) == 3 == float(states[2].theta["a"]["w"])


def test_identical_vectors_count_once(tmp_path):
    method = FedBip(local=JUMP)
    fed = federation(method, {"a": [3.0], "b": [3.0], "c": [5.0]}, tmp_path)
    state = run(method, fed, 1)[1]
    np.testing.assert_allclose(state.p["p"][0], np.tile([0.5, 0, 0.5], (3, 1)), atol=1e-7)
    assert [(e.client, e.code) for e in fed.excluded] == [("b", "E_DUPLICATE")]


def test_raw_sums_near_zero_stop_the_run(tmp_path):
    method = FedBip(local=JUMP, negative="raw")
    with pytest.raises(
        RunError, match=r'similarities of a to all clients have a sum of less than 0\.1 in model.*"clip"'
    ):
        run(method, federation(method, {"a": [3.0], "b": [-1.0]}, tmp_path), 1)


@pytest.mark.parametrize("absent", ["cached", "present"])
def test_absent_clients_keep_their_aggregate(tmp_path, absent):
    method = FedBip(local=JUMP, fraction=0.34, absent=absent)  # one of three a round
    fed = federation(method, ROWS, tmp_path)
    states = run(method, fed, 4)
    for before, after in itertools.pairwise(states):
        came = {c for c in ROWS if after.p["p"][0][fed.clients.index(c)].any()}
        assert len(came) == 1
        for c in set(ROWS) - came:
            assert after.theta_bar[c] is before.theta_bar[c]
        (row,) = (after.p["p"][0][fed.clients.index(c)] for c in came)
        assert float(row.sum()) == pytest.approx(1)
        if absent == "present":
            assert sorted(row.tolist()) == [0, 0, 1]


def test_ditto_pulls_to_the_clients_own_aggregate(tmp_path):
    # v from 1, optimum 3, lambda 1, one step of .5: v = 1 - .5 (1 - 3) = 2 = theta; alone, theta_bar = 2 too, so that
    # v = 2 - .5 ((2 - 3) + (2 - 2)) = 2.5 in round 2.
    local = DittoOptimiser(learning_rate=0.5, batch_size=8, lambda_=1.0)
    method = FedBip(local=local)
    fed = federation(method, {"a": [3.0]}, tmp_path)
    first, second = (run(method, fed, 2))[1:]
    assert predictions.personal(method)
    assert predictions.keeps_parts(method)
    assert float(first.theta["a"]["w"]) == 2
    assert float(second.theta["a"]["w"]) == 2.5
    own = fed.ask(Evaluation(method).reveal, w=second.theta["a"])
    assert float(own["a"]["w"]) == pytest.approx(2.5)


def test_a_newcomer_by_hand():
    # From 0: own tau = 1; sigma = 2, -2: only the first is similar: (1 + 2) / 2 = 1.5.
    method = FedBip()
    w = lambda x: Params({"w": torch.tensor([x])})  # noqa: E731

    bars = {"a": w(2.0), "b": w(-2.0)}
    state = BipState(bars, bars, {}, w(0.0), ("model",))
    found, weights = method.newcomer(Quadratic(), state, w(0.0), "new", lambda start: start + w(1.0))
    assert float(found["w"]) == pytest.approx(1.5)
    assert weights == {"new": 0.5, "a": 0.5, "b": 0}
    opposed = BipState({"b": w(-2.0)}, {"b": w(-2.0)}, {}, w(0.0), ("model",))
    with pytest.raises(InputError, match="raw"):
        FedBip(negative="raw").newcomer(Quadratic(), opposed, w(0.0), "new", lambda start: start + w(1.0))


def test_the_raw_sums_of_an_absent_client_stop_nothing(tmp_path):
    # The cached vectors of a and b cancel: their own sums are small, but they are only heard of.
    method = FedBip(negative="raw")
    now, tau = ["c"], {k: Params({"x": torch.tensor(v)}) for k, v in (("a", [1.0, 0.0]), ("b", [-1.0, 0.0]))}
    tau["c"] = Params({"x": torch.tensor([1.0, 2.0])})
    fed = SimpleNamespace(round=2, model=SimpleNamespace(names=("x",), live=lambda: {"x": 0}))
    p = method.weights(fed, gram(list(tau.values())), tau, now)
    np.testing.assert_allclose(p, [[[5**-0.5, -(5**-0.5), 1]]], atol=1e-7)


def test_of_two_equal_vectors_the_later_is_the_copy(tmp_path):
    told, tau = [], {k: Params({"w": torch.tensor([v])}) for k, v in (("a", 2.0), ("b", 2.0), ("c", 1.0))}
    fed = SimpleNamespace(round=2, exclude=lambda *of: told.append(of))
    p = FedBip().weights(fed, gram(list(tau.values())), tau, ["a", "c"])  # b's was there before, a's is sent now
    assert [(client, code) for client, code, _ in told] == [("a", "E_DUPLICATE")]
    np.testing.assert_allclose(p, np.tile([0, 0.5, 0.5], (1, 2, 1)), atol=1e-7)


# --- what LoRA adds: the space of products ---------------------------------------------------------------------------
class Lora:
    """Two adapted maps, 5 to 6 and 6 to 4, and a head, of rank 3 and alpha 6."""

    adaptation = "lora"
    adaptation_spec = AdaptationSpec("lora", rank=3, alpha=6.0)

    def __init__(self):
        self.w = draw(0, 3)
        self.names, self.layout = tuple(self.w), self.w.layout

    def live(self):
        return dict(self.w)


def draw(seed, rank, size=1.0):
    rng = torch.Generator().manual_seed(seed)
    shapes = {"q": (6, 5), "v": (4, 6)}
    out = {}
    for path, (m, n) in shapes.items():
        out[f"{path}.lora_A.default.weight"] = size * torch.randn(rank, n, generator=rng)
        out[f"{path}.lora_B.default.weight"] = size * torch.randn(m, rank, generator=rng)
    return Params(out | {"head.weight": torch.randn(2, 4, generator=rng)})


def dense(w):
    """(6 x 5 + 4 x 6 + 2 x 4,): what w adds, and its head."""
    s = 6.0 / len(w["q.lora_A.default.weight"])
    parts = [s * w[f"{p}.lora_B.default.weight"] @ w[f"{p}.lora_A.default.weight"] for p in "qv"]
    return torch.cat([t.double().reshape(-1) for t in (*parts, w["head.weight"])]).numpy()


def changes(ranks):
    starts = [draw(20 + i, r) for i, r in enumerate(ranks)]
    ends = [w + 0.3 * draw(40 + i, r) for i, (w, r) in enumerate(zip(starts, ranks, strict=True))]
    return [Change(end - start, end) for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_products_of_unequal_ranks_are_those_of_the_dense_matrices(whole, centre):
    x = changes([1, 2, 3])
    rows = np.stack([dense(c.theta) - (0 if whole else dense(c.theta - c.tau)) for c in x])
    rows -= rows.mean(1, keepdims=True) if centre else 0
    found = Products(Lora(), "model").gram(x, whole, centre)
    np.testing.assert_allclose(found[0], rows @ rows.T, rtol=1e-5, atol=1e-5)


def test_another_basis_of_the_same_product_changes_nothing():
    x, turn = changes([3, 3]), torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))[0]

    def turned(w):
        a = {n: turn.T @ t for n, t in w.items() if "lora_A" in n}
        return w.replace(a | {n: t @ turn for n, t in w.items() if "lora_B" in n})

    theta, start = turned(x[1].theta), turned(x[1].theta - x[1].tau)
    y = [x[0], Change(theta - start, theta)]
    model = Lora()
    np.testing.assert_allclose(Products(model, "model").gram(x), Products(model, "model").gram(y), rtol=1e-4)
    assert not np.allclose(Entries(model, "model").gram(x), Entries(model, "model").gram(y), rtol=0.05)


def test_sums_of_products_are_cut_to_each_rank():
    x, p = changes([1, 2, 3]), np.array([[[0.6, 0.4, 0.0], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]]])
    onto = [c.theta - c.tau for c in x]
    found, cut = Products(Lora(), "model").mix(p, x, onto)
    taus = [dense(c.theta) - dense(c.theta - c.tau) for c in x]
    lost = whole = 0.0
    for w, base, row in zip(found, onto, p[0], strict=True):
        exact = dense(base) + sum(c * t for c, t in zip(row, taus, strict=True))
        assert w.layout is base.layout
        rank = len(w["q.lora_A.default.weight"])
        for at, (m, n) in ((0, (6, 5)), (30, (4, 6))):
            u, s, v = np.linalg.svd(exact[at : at + m * n].reshape(m, n))
            best = (u[:, :rank] * s[:rank]) @ v[:rank]
            np.testing.assert_allclose(dense(w)[at : at + m * n].reshape(m, n), best, atol=1e-5)
            lost, whole = lost + (s[rank:] ** 2).sum(), whole + (s**2).sum()
        np.testing.assert_allclose(dense(w)[54:], exact[54:], atol=1e-5)
    assert cut == pytest.approx(np.sqrt(lost / whole), rel=1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_products_of_vectors_in_files_have_the_same_bits(monkeypatch, whole):
    x, p = changes([1, 2, 3]), np.array([[[0.6, 0.4, 0.0], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]]])
    onto, space = [c.theta - c.tau for c in x], Products(Lora(), "model")
    before = [w.sha256() for w in onto]
    (memory, cut), G = space.mix(p, x, onto, whole), space.gram(x, whole)
    monkeypatch.setenv("FEDFM_MEMORY", "0")
    tau, theta, onto = keep_all(c.tau for c in x), keep_all(c.theta for c in x), keep_all(onto)
    x = list(map(Change, tau, theta))
    files, again = space.mix(p, x, onto, whole)
    assert all(location_of(flat) for w in files for flat in w.flats.values())
    assert [w.sha256() for w in files] == [w.sha256() for w in memory]
    assert again == cut
    assert space.gram(x, whole).tobytes() == G.tobytes()
    assert [w.sha256() for w in onto] == before  # the starts are the next round's, too


def test_a_newcomer_hears_of_clients_of_every_rank():
    model, method = Lora(), FedBip(space="product", ranks=(1, 3, 2))
    w_0 = model.w.replace({n: 0 * t for n, t in model.w.items() if "lora_B" in n})
    bars = {k: lora.first(w_0, r) + 0.3 * draw(60 + r, r) for k, r in (("a", 1), ("b", 3), ("c", 2))}
    own = 0.3 * draw(70, 3)
    found, weights = method.newcomer(model, BipState(bars, bars, {}, w_0, ("model",)), w_0, "new", lambda w: w + own)
    v = np.stack([dense(w) - dense(w_0) for w in (w_0 + own, *bars.values())])
    g = np.maximum(v @ v[0] / np.linalg.norm(v, axis=1) / np.linalg.norm(v[0]), 0)
    np.testing.assert_allclose([weights[k] for k in ("new", "a", "b", "c")], g / g.sum(), atol=1e-6)
    assert min(g) > 0.01
    exact = dense(w_0) + g @ v / g.sum()
    u, s, vt = np.linalg.svd(exact[:30].reshape(6, 5))
    np.testing.assert_allclose(dense(found)[:30].reshape(6, 5), (u[:, :3] * s[:3]) @ vt[:3], atol=1e-5)
    np.testing.assert_allclose(dense(found)[54:], exact[54:], atol=1e-6)


def test_clients_of_different_ranks_in_a_run(tmp_path):
    tiny_text.save_bert(tmp_path / "bert")
    tiny_text.texts(tmp_path / "rows.jsonl")
    keys = {"space": "product", "ranks": [1, 4], "granularity": "layer"}
    tables = tiny_text.tables(tmp_path, "fedbip", local={"learning_rate": 0.03}, **keys)
    result = fedfm.run(tables, tmp_path / "run")
    assert 0 < result["details"]["cut"] < 1
    ranks = []
    for client in sorted(result["client_accuracy"]):
        config = json.loads((tmp_path / "run" / "clients" / client / "adapter" / "adapter_config.json").read_text())
        ranks.append(config["r"])
        assert predict.predict(tmp_path / "run", tmp_path / "rows.jsonl", client)["predictions"]
    assert ranks == [1, 4, 1]
    with pytest.raises(InputError, match="above"):
        fedfm.run(tables | {"method": tables["method"] | {"ranks": [8]}}, tmp_path / "wide")


@pytest.mark.parametrize(
    ("adaptation", "ranks", "says"),
    [("full", [], 'space = "product" takes "lora" only'), ("lora", [9], "9 is above model.adaptation.rank = 4")],
)
def test_settings_that_the_product_space_lacks_are_refused_before_rows_are_read(adaptation, ranks, says):
    model = {"name": "nano-vit", "adaptation": {"name": adaptation, "rank": 4}}
    method = {"name": "fedbip", "space": "product", "ranks": ranks}
    with pytest.raises(InputError, match=says):
        Experiment.from_dict({"data": {"name": "digits"}, "model": model, "method": method})


# --- clients that lie or fail ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("delta", "code"),
    [
        ({"v": torch.tensor([1.0])}, "E_TENSORS"),
        ({"w": torch.tensor([1.0, 2.0])}, "E_SHAPE"),
        ({"w": torch.tensor([1.0], dtype=torch.float64)}, "E_DTYPE"),
        ({"w": torch.tensor([float("nan")])}, "E_NONFINITE"),
    ],
)
def test_a_vector_of_another_kind_is_that_of_an_absent_client(tmp_path, delta, code):
    def lie(fn, client, payload):
        return Update(Params(delta), 1.0) if client.id == "b" else fn(client, **payload)

    method = FedBip(local=JUMP)
    fed = federation(method, ROWS, tmp_path, attack=lie)
    state = run(method, fed, 1)[1]
    assert [(e.client, e.code) for e in fed.excluded] == [("b", code)]
    assert values(state, "theta_bar") == pytest.approx([3, 1, -1])
    np.testing.assert_array_equal(state.p["p"][0], np.diag([1, 0, 1]))


def test_a_copied_vector_does_not_count_twice(tmp_path):
    seen = {}

    def copy(fn, client, payload):
        seen[client.id] = fn(client, **payload)
        return seen["a"] if client.id == "b" else seen[client.id]

    method = FedBip(local=JUMP)
    fed = federation(method, ROWS, tmp_path, attack=copy)
    state = run(method, fed, 1)[1]
    assert [(e.client, e.code) for e in fed.excluded] == [("b", "E_DUPLICATE")]
    assert values(state, "theta_bar") == pytest.approx([3, 3, -1])


def test_a_loud_vector_is_capped(tmp_path):
    def loud(fn, client, payload):
        update = fn(client, **payload)
        return Update(100.0 * update.delta, 1.0) if client.id == "b" else update

    rows = {"a": [3.0], "b": [5.0], "c": [2.0]}  # from 1: tau = 2, 400, 1; three times their median is 6
    for cap, expected in ((None, 1 + 403 / 3), (3.0, 1 + 9 / 3)):
        method = FedBip(local=JUMP, norm_cap=cap)
        state = run(method, federation(method, rows, tmp_path / str(cap), attack=loud), 1)[1]
        assert float(state.theta_bar["a"]["w"]) == pytest.approx(expected)


@pytest.mark.parametrize("keys", [{}, {"similarity": "l2"}, {"similarity": "pearson"}, {"weights_from": "parameters"}])
def test_a_cap_takes_no_second_look_at_all_pairs(tmp_path, monkeypatch, keys):
    looks = []

    def counted(x, *args, **more):
        looks.append(len(x))
        return gram(x, *args, **more)

    monkeypatch.setattr("fedfm.methods.fedbip.task_vectors.gram", counted)
    rows = {"a": [3.0, 3.0], "b": [5.0], "c": [2.0]}
    found = {}
    for cap in (None, 1.0):
        looks.clear()
        method = FedBip(local=JUMP, norm_cap=cap, **keys)
        found[cap] = run(method, federation(method, rows, tmp_path / f"{cap}"), 1)[1]
        assert sorted(looks) == ([1, 1, 1, 3] if cap and keys not in ({}, {"similarity": "l2"}) else [3])
    tau = np.array([2.0, 4.0, 1.0])  # from 1
    p = found[1.0].p["p"][0].numpy()
    np.testing.assert_array_equal(p, found[None].p["p"][0].numpy())
    np.testing.assert_allclose(values(found[1.0], "theta_bar"), 1 + p @ np.minimum(tau, 2.0), rtol=1e-6)


def test_task_vectors_in_16_bits_keep_their_cosines_and_weights_do_not():
    rng = torch.Generator().manual_seed(0)
    w = Params({"x": torch.randn(50_000, generator=rng)})
    shared, own = torch.randn(50_000, generator=rng), [torch.randn(50_000, generator=rng) for _ in range(2)]
    tau = [Params({"x": 1e-3 * (0.84 * shared + 0.55 * x)}) for x in own]
    exact = tau[0].cosine(tau[1])
    method, layout = FedBip(transport="bfloat16"), w.layout
    half = [t.cast(method.wire_layout(layout)).cast(layout) for t in tau]
    assert half[0].cosine(half[1]) == pytest.approx(exact, abs=0.002)
    weights = [(w + t).cast(method.wire_layout(layout)).cast(layout) - w for t in tau]
    assert weights[0].cosine(weights[1]) < exact - 0.05


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    tiny_text.save_bert(folder / "bert")
    tiny_text.texts(folder / "rows.jsonl")

    def tables(kernels="exact", **method):
        common = {"clients": 4, "lora": {"rank": 2}, "local": {"learning_rate": 0.01}, "granularity": "layer"}
        return tiny_text.tables(folder, "fedbip", run={"kernels": kernels}, **common, **method)

    return tables


def test_a_cohort_in_one_batch_is_the_cohort_one_by_one(texts, tmp_path):
    one_by_one = fedfm.run(texts(), tmp_path / "exact")
    together = fedfm.run(texts("fast"), tmp_path / "fast")
    state = [fedfm.load_run(tmp_path / k).state(FedBip.state_type) for k in ("exact", "fast")]
    for client in one_by_one["client_accuracy"]:
        exact, fast = (s.theta[client] for s in state)
        assert (exact - fast).norm() < 1e-4 * exact.norm()
    assert together["local_accuracy"] == pytest.approx(one_by_one["local_accuracy"], abs=0.1)


def test_vectors_at_half_the_bytes(texts, tmp_path):
    full = fedfm.run(texts(rounds=1), tmp_path / "full")
    half = fedfm.run(texts(rounds=1, transport="bfloat16"), tmp_path / "half")
    saved = 4 * 2 * fedfm.load_run(tmp_path / "full").manifest["model"]["trainable"]  # clients x bytes x entries
    assert full["bytes_up"] - half["bytes_up"] == pytest.approx(saved, rel=0.1)  # names of dtypes are longer
    assert half["bytes_down"] == full["bytes_down"]


def test_with_a_frozen_vectors_are_of_b_alone(texts, tmp_path):
    frozen = texts(rounds=1)
    frozen["model"]["adaptation"]["name"] = "ffa_lora"
    result = fedfm.run(frozen, tmp_path / "run")
    assert result["bytes_up"] < fedfm.run(texts(rounds=1), tmp_path / "both")["bytes_up"]


class Tap:
    """A link that keeps what each client is asked with and what it sends back."""

    def __init__(self, link):
        self._link, self.sent, self.got = link, {}, {}

    @property
    def clients(self):
        return self._link.clients

    def exchange(self, requests):
        self.sent |= {r.client: r.payload["theta_bar"] for r in requests if "theta_bar" in r.payload}
        for reply in self._link.exchange(requests):
            if isinstance(reply.value, Update):
                self.got[reply.client] = reply.value.delta
            yield reply


def test_the_server_sends_one_a_to_all_and_gets_changes_and_no_weights(tmp_path):
    tables = {
        "data": {"name": "digits", "limit": 120, "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 3}},
        "model": {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 2}},
        "method": {"name": "fedbip", "local": {"name": "adamw", "learning_rate": 0.003}},
    }

    def a_round(name):
        experiment = Experiment.from_dict(tables | {"method": tables["method"] | {"name": name}})
        population = populate(experiment)
        tap = Tap(LocalLink(Silos(experiment.method, Aggregator(), population, memory=tmp_path / name)))
        fed = Federation(tap, model=population.model, aggregator=Aggregator())
        fed.begin(0)
        state = experiment.method.init(fed)
        fed.begin(1)
        return fed.initial, experiment.method.step(fed, state, 1), tap

    theta_pre, state, tap = a_round("fedbip")
    assert len(tap.sent) == len(tap.got) == 3
    a = [n for n in theta_pre.layout.slots if "lora_A" in n]
    assert a
    assert all(theta_pre[n].abs().min() > 0 for n in a)
    assert {theta_bar.sha256() for theta_bar in tap.sent.values()} == {theta_pre.sha256()}  # the A of all three, too
    alone = a_round("local")[1]
    for client, tau in tap.got.items():
        theta = theta_pre + tau
        assert theta.sha256() == state.theta[client].sha256()
        trained = alone[client]  # what local training makes of the same start and rows
        assert (theta - trained).norm() < 1e-5 * tau.norm()
        assert (tau - trained).norm() > 0.5 * theta_pre.norm()
