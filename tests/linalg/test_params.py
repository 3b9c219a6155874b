"""Params against plain NumPy on the concatenated vector."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.linalg.params import Params, sha256_of
from fedfm.linalg.running_mean import RunningMean, weighted_mean

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)


@st.composite
def pairs(draw, count=2):
    """Several Params of one random layout."""
    layout = draw(shapes)
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    return [
        Params({f"layer{i}.w": torch.from_numpy(rng.normal(size=s).astype(np.float32)) for i, s in enumerate(layout)})
        for _ in range(count)
    ]


def flat(p):
    return np.concatenate([t.numpy().ravel() for t in p.values()]).astype(np.float64)


@settings(deadline=None)
@given(pairs(), st.floats(-3, 3, width=32))
def test_vector_space(two, a):
    x, y = two
    np.testing.assert_allclose(flat(x + a * y), flat(x) + a * flat(y), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(flat(x - y), flat(x) - flat(y), rtol=1e-6, atol=1e-6)
    assert x.dot(y) == pytest.approx(float(flat(x) @ flat(y)), rel=1e-9, abs=1e-12)
    assert x.norm() == pytest.approx(float(np.linalg.norm(flat(x))), rel=1e-9)
    assert -1 - 1e-9 <= x.cosine(y) <= 1 + 1e-9
    assert (x - x).norm() == 0
    assert flat(x / 2).tolist() == (flat(x) / 2).tolist()


@settings(deadline=None)
@given(pairs(count=4), st.lists(st.floats(0.1, 100), min_size=4, max_size=4))
def test_streaming_mean_equals_the_formula(terms, weights):
    got = flat(weighted_mean(zip(weights, terms, strict=True)))
    want = sum(w * flat(x) for w, x in zip(weights, terms, strict=True)) / sum(weights)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_mean_of_one_is_that_one_up_to_rounding():
    x = Params({"w": torch.randn(1000)})
    assert (weighted_mean([(3.0, x)]) - x).norm() < 1e-5 * x.norm()


def test_a_mean_needs_weight():
    with pytest.raises(ValueError, match="positive weight"):
        weighted_mean([])
    mean = RunningMean()
    mean.add(0.0, Params({"w": torch.ones(1)}))
    with pytest.raises(ValueError, match="positive weight"):
        mean.result()


@pytest.mark.parametrize(
    ("other", "error"),
    [
        ({"v": torch.ones(2)}, KeyError),
        ({"w": torch.ones(3)}, ValueError),
        ({"w": torch.ones(2, dtype=torch.float64)}, ValueError),
        ({"w": torch.ones(2), "b": torch.ones(1)}, KeyError),
    ],
)
def test_a_mismatch_raises(other, error):
    with pytest.raises(error):
        Params({"w": torch.ones(2)}) + Params(other)


def test_another_order_of_names_raises():
    a, b = torch.ones(1), torch.ones(1)
    with pytest.raises(KeyError, match="order"):
        Params({"a": a, "b": b}) + Params({"b": b, "a": a})


def test_params_are_copies_of_their_source():
    source = torch.zeros(3)
    p = Params({"w": source})
    source += 1
    assert p["w"].sum() == 0


def test_integers_are_carried_and_not_scaled():
    x = Params({"w": torch.ones(2), "steps": torch.tensor([7])})
    y = 0.5 * x + 0.5 * x
    assert y["w"].tolist() == [1.0, 1.0]
    assert y["steps"].tolist() == [7]
    assert y["steps"].dtype == torch.int64


def test_join_and_part_are_inverse():
    x, c = Params({"w": torch.ones(2)}), Params({"w": torch.zeros(2)})
    both = Params.join(x=x, c=c)
    assert list(both) == ["x/w", "c/w"]
    assert both.part("c")["w"].tolist() == [0.0, 0.0]


def test_norm_of_many_entries_is_exact():
    n = 5_000_001
    assert Params({"w": torch.full((n,), 0.1)}).norm() == pytest.approx(
        float(np.float32(0.1)) * math.sqrt(n), rel=1e-10
    )


def test_is_finite_distinguishes_overflowing_sums_from_bad_entries():
    assert Params({"w": torch.full((8,), 3e38)}).is_finite()
    assert not Params({"w": torch.tensor([1.0, float("nan")])}).is_finite()
    assert not Params({"w": torch.tensor([float("inf"), float("-inf")])}).is_finite()


def test_hash_sees_names_shapes_dtypes_values_and_not_the_order():
    w = torch.arange(4, dtype=torch.float32)
    base = Params({"a": w, "b": w}).sha256()
    assert Params({"b": w, "a": w}).sha256() == base
    for other in ({"a": w, "c": w}, {"a": w.view(2, 2), "b": w}, {"a": w.double(), "b": w}, {"a": w + 1e-6, "b": w}):
        assert Params(other).sha256() != base
    assert sha256_of({"k": Params({"a": w})}) != sha256_of({"j": Params({"a": w})})


def test_replace_and_only():
    p = Params({"l0.w": torch.ones(1), "l0.b": torch.ones(1), "l1.w": torch.ones(1)})
    assert p.replace({"l1.w": torch.zeros(1)})["l1.w"].item() == 0
    with pytest.raises(KeyError):
        p.replace({"nope": torch.zeros(1)})
    assert list(p.only(["l1.w"])) == ["l1.w"]


def test_numbers_of_numpy_multiply_as_pythons_do():
    x = Params({"w": torch.tensor([1.0, 3.0])})
    assert (np.float64(0.5) * x)["w"].tolist() == [0.5, 1.5]
    assert (x * np.float32(2))["w"].tolist() == [2.0, 6.0]
