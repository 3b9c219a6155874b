"""FedBip against numbers worked by hand, and its limits: orthogonal, opposed, identical and zero task vectors."""

import itertools

import numpy as np
import pytest
import torch

from fedfm.errors import RunError
from fedfm.methods.fedbip import FedBip, Personal, capped, copies, shares, similarities
from fedfm.pairwise import mix
from fedfm.params import Params
from fedfm.training import SGD, Ditto
from toy import federation, run

TAU = [Params({"x": torch.tensor([a, b])}) for a, b in ((3.0, 0.0), (3.0, 4.0), (0.0, -2.0))]
ALL = [("x",)]


def p_of(vectors, negative, kind="cosine", layers=ALL):
    g, counts = similarities(vectors, layers, kind)
    return shares(g, counts, negative)


def test_cosines_of_three_vectors():
    g, _ = similarities(TAU, ALL, "cosine")
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


def test_three_vectors_that_cancel():
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
    g, _ = similarities([Params({"x": torch.from_numpy(v)}) for v in draw], ALL, "pearson")
    np.testing.assert_allclose(g[0], np.corrcoef(draw), atol=1e-6)


def test_l2_by_the_median_distance():
    # Distances 4 (0, 1), sqrt(13) (0, 2), sqrt(45) (1, 2); their median is 4.
    g, _ = similarities(TAU, ALL, "l2")
    np.testing.assert_allclose(g[0, 0], [1, 0.5, 1 / (1 + np.sqrt(13) / 4)], atol=1e-6)
    np.testing.assert_allclose(g[0, 1, 2], 1 / (1 + np.sqrt(45) / 4), atol=1e-6)


def test_softmax_at_its_temperature():
    g, counts = similarities(TAU, ALL, "cosine")
    expected = torch.softmax(torch.from_numpy(g) / 0.3, 2)
    np.testing.assert_allclose(shares(g, counts, "softmax", 0.3), expected, atol=1e-9)


def test_copies_are_found_and_zeros_are_none():
    zero = Params({"x": torch.zeros(2)})
    assert list(copies({"a": TAU[0], "b": TAU[0] + zero, "c": TAU[1], "d": zero, "e": zero})) == [("b", "a")]


def test_a_norm_above_the_cap_is_cut():
    far = capped([TAU[0], TAU[1], 100.0 * TAU[2]], 3.0)
    assert [x.norm() for x in far] == pytest.approx([3, 5, 15])  # median norm 5


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
    assert [float(w["w"]) for w in method.starts(states[1]).values()] == [1, 1, 1]
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
    with pytest.raises(RunError, match=r'similarities of a to all sum to less than 0\.1 in model.*"clip"'):
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
    local = Ditto(learning_rate=0.5, batch_size=8, lambda_=1.0)
    method = FedBip(local=local)
    fed = federation(method, {"a": [3.0]}, tmp_path)
    first, second = (run(method, fed, 2))[1:]
    assert method.personal
    assert method.kept
    assert float(first.theta["a"]["w"]) == 2
    assert float(second.theta["a"]["w"]) == 2.5
    own = fed.ask(method.reveal, w=second.theta["a"])
    assert float(own["a"]["w"]) == pytest.approx(2.5)


def test_a_newcomer_by_hand():
    # From 0: own tau = 1; sigma = 2, -2: only the first is similar: (1 + 2) / 2 = 1.5.
    method = FedBip()
    w = lambda x: Params({"w": torch.tensor([x])})  # noqa: E731

    class Toy:
        names = ("w",)

        def live(self):
            return {"w": torch.zeros(1)}

    bars = {"a": w(2.0), "b": w(-2.0)}
    state = Personal(bars, bars, {}, w(0.0), ("model",))
    found, weights = method.newcomer(Toy(), state, w(0.0), "new", lambda start: start + w(1.0))
    assert float(found["w"]) == pytest.approx(1.5)
    assert weights == {"new": 0.5, "a": 0.5, "b": 0}
