"""Passes over whole vectors against naive loops in float64, and a mean's bits against the operations one by one."""

import gc
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Params
from fedfm.linalg.running_mean import RunningMean, weighted_mean
from fedfm.methods.fedbaf.pull import Piece, direction_distance, mix

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
EPS = {d: torch.finfo(d).eps for d in FLOATS}


def drawn(seed, *shapes, dtypes=(torch.float32,), scale=1.0):
    rng = np.random.default_rng(seed)
    return Params(
        {
            f"l{i}.w": torch.as_tensor(scale * rng.normal(size=shape)).to(dtypes[i % len(dtypes)])
            for i, shape in enumerate(shapes)
        }
    )


def numbers(p, names=None):
    return [x for name in (names or p) for x in p[name].flatten().tolist() if p[name].is_floating_point()]


def bits(p):
    return {d: f.view(torch.uint8).tolist() for d, f in p.flats.items()}


# --- the distance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1.0, 1e-3])  # of the step between the two
def test_the_distance_is_the_formula_summed_exactly(dtype, scale):
    w = drawn(0, (40, 50), (7,), (20_001,), dtypes=(dtype,))
    u = Params({n: t + (scale * d.double()).to(dtype) for (n, t), d in zip(w.items(), drawn(1, *(t.shape for t in w.values())).values(), strict=True)})  # fmt: skip  # noqa: E501
    got = direction_distance(u, w)
    x, y = numbers(u), numbers(w)
    norms = [math.sqrt(math.fsum(v * v for v in z)) for z in (x, y)]
    want = math.sqrt(math.fsum((a / norms[0] - b / norms[1]) ** 2 for a, b in zip(x, y, strict=True)))
    assert got == pytest.approx(want, rel=1e-11)
    assert u.norm() == pytest.approx(norms[0], rel=1e-13)
    assert u.dot(w) == pytest.approx(math.fsum(a * b for a, b in zip(x, y, strict=True)), rel=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.integers(0, 99),
)
def test_the_distance_of_some_names_is_that_of_the_vector_of_these_names(shapes, which, seed):
    u, w = (drawn(s, *shapes, dtypes=FLOATS) for s in (seed, seed + 1))
    names = [n for i, n in enumerate(u) if i in which]
    got = direction_distance(u, w, names)
    x, y = np.array(numbers(u.only(names), names)), np.array(numbers(w.only(names), names))
    if not names:
        x = y = np.zeros(0)
    a, b = np.linalg.norm(x), np.linalg.norm(y)
    want = np.linalg.norm(x / a - y / b) if a and b else 0.0
    assert got == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_the_distance_leaves_integers_out_and_refuses_what_differs():
    u = Params({"w": torch.tensor([3.0, 4.0]), "steps": torch.tensor([100])})
    w = Params({"w": torch.tensor([5.0, 0.0]), "steps": torch.tensor([0])})
    assert direction_distance(u, w) == pytest.approx(math.sqrt(0.8))
    assert direction_distance(u, u) == 0
    assert direction_distance(u, 0 * w) == 0
    with pytest.raises(KeyError, match="bias"):
        direction_distance(u, w, ["bias"])
    with pytest.raises(KeyError, match="names differ"):
        direction_distance(u, Params({"w": torch.ones(2)}))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_distance_shows_an_entry_that_is_not_finite(bad):
    w = drawn(0, (3000,))
    u = Params({"l0.w": w["l0.w"].clone().index_fill_(0, torch.tensor([1777]), bad)})
    assert not math.isfinite(direction_distance(u, w))
    assert not math.isfinite(u.norm())


def test_norms_of_many_equal_entries_are_the_closed_form():
    n, value = 10_000_019, float(np.float32(0.1))
    x = Params({"w": torch.full((n,), 0.1)})
    y = Params({"w": torch.full((n,), 0.3)})
    a, b = value * math.sqrt(n), float(np.float32(0.3)) * math.sqrt(n)
    assert direction_distance(x, y) < 1e-6  # parallel vectors: the root of the rounding of sums, 1e-14 on some machines
    assert x.norm() == pytest.approx(a, rel=1e-12)
    assert x.dot(y) == pytest.approx(a * b, rel=1e-12)


# --- the mixture ------------------------------------------------------------------------------------------------------


@st.composite
def mixtures(draw):
    """Params, pieces and their a, of random shapes, dtypes, regions and kinds of a."""
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=6))
    seed = draw(st.integers(0, 999))
    u, pre = (drawn(s, *shapes, dtypes=draw(st.sampled_from([FLOATS, FLOATS[:1]]))) for s in (seed, seed + 1))
    rng, pieces, a = np.random.default_rng(seed), {}, {}
    for name, t in u.items():
        kind = draw(st.sampled_from(["none", "whole", "whole", "slice"]))
        if kind == "none":
            continue
        region = tuple(t.shape) if kind == "whole" else tuple(draw(st.integers(0, n)) for n in t.shape)
        pieces[name] = Piece(region, pre[name][tuple(map(slice, region))])
        of = draw(st.sampled_from(["same", "zero", "own", "entry"]))
        number = {"same": 0.75, "zero": 0.0}.get(of, float(rng.uniform(0, 2)))
        a[name] = torch.as_tensor(rng.uniform(0, 2, size=region)) if of == "entry" and region else number
    return u, pieces, a


@settings(deadline=None, max_examples=150)
@given(mixtures())
def test_the_mixture_is_the_formula_entry_by_entry(case):
    u, pieces, a = case
    before = bits(u)
    got = mix(u, pieces, a)
    assert got.layout is u.layout
    assert bits(u) == before
    for name, t in u.items():
        for index in np.ndindex(*t.shape):
            x, y = float(t[index]), float(got[name][index])
            if name not in pieces or any(i >= n for i, n in zip(index, pieces[name].region, strict=True)):
                assert y == x
                continue
            weight = float(a[name][index] if isinstance(a[name], torch.Tensor) else a[name])
            p = float(pieces[name].tensor[index])
            want = (x + weight * p) / (1 + weight)
            size = (abs(x) + abs(weight * p)) / (1 + weight)  # before anything cancels
            assert abs(y - want) <= EPS[t.dtype] * abs(want) + 4e-16 * size + 1e-7 * (t.dtype == torch.float16)


def test_a_of_zero_and_integers_keep_the_bits():
    u = Params({"w": torch.tensor([-0.0, 1.5, 3e38]), "steps": torch.tensor([7])})
    p = Piece((3,), torch.tensor([1.0, float("inf"), 3e38]))
    assert bits(mix(u, {"w": p}, 0.0)) == bits(u)
    got = mix(u, {"w": p}, 1.0)
    assert got["w"].tolist() == [0.5, math.inf, float(np.float32(3e38))]  # no overflow on the way
    assert got["steps"].tolist() == [7]


@pytest.mark.parametrize(
    ("piece", "a", "match"),
    [
        (Piece((4,), torch.ones(4)), 1.0, "region"),
        (Piece((2, 1), torch.ones(2, 1)), 1.0, "region"),
        (Piece((2,), torch.ones(3)), 1.0, "piece of shape"),
        (Piece((2,), torch.ones(2)), -0.5, "at least 0"),
        (Piece((2,), torch.ones(2)), math.nan, "at least 0"),
        (Piece((2,), torch.ones(2)), math.inf, "finite"),
        (Piece((2,), torch.ones(2)), {"w": torch.tensor([1.0, -1.0])}, "at least 0"),
        (Piece((2,), torch.ones(2)), {"w": torch.ones(3)}, "a has shape"),
    ],
)
def test_mismatched_pieces_and_factors_are_refused(piece, a, match):
    with pytest.raises(ValueError, match=match):
        mix(Params({"w": torch.ones(3)}), {"w": piece}, a)
    with pytest.raises(KeyError, match="v"):
        mix(Params({"w": torch.ones(3)}), {"v": piece}, a)


# --- the mean's bits --------------------------------------------------------------------------------------------------


def one_by_one(weights, flats, base=None):
    """The operations of a running sum, each on whole vectors, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        total = flats[0] * weights[0]
        for weight, flat in zip(weights[1:], flats[1:], strict=True):
            total.add_(flat, alpha=weight)
        mean = total / sum(map(float, weights))
        return mean if base is None else base + mean
    finally:
        torch.set_num_threads(threads)


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("size", [1, 31, 32, 63, 64, 95, 32768 + 17, 70_001, 100_096])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_mean_has_the_bits_of_the_operations_one_by_one(size, dtype):
    for count in (1, 2, 3, 4, 6, 7, 10) if dtype == torch.float32 else (3, 7):
        terms = [drawn(k, (size,), dtypes=(dtype,)) for k in range(count + 1)]
        base, flats = terms.pop(), [t.flats[dtype] for t in terms[:count]]
        weights = [3.0 * k + 1 for k in range(count)]
        mean = weighted_mean(zip(weights, terms, strict=True))
        wanted = one_by_one(weights, flats)
        assert same(mean.flats[dtype], wanted)
        assert same((base + mean).flats[dtype], one_by_one(weights, flats, base.flats[dtype]))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4),
    st.lists(st.one_of(st.integers(1, 5000), st.floats(1e-3, 5000)), min_size=1, max_size=9),
)
def test_a_mean_of_several_dtypes_has_these_bits_too(shapes, weights):
    terms = [drawn(k, *shapes, dtypes=FLOATS) for k in range(len(weights))]
    mean = weighted_mean(zip(weights, terms, strict=True))
    assert list(mean) == list(terms[0])
    for dtype, flat in mean.flats.items():
        assert same(flat, one_by_one(weights, [t.flats[dtype] for t in terms]))


def test_a_mean_is_a_params_like_any_other():
    x = Params({"w": torch.tensor([1.0, 2.0]), "steps": torch.tensor([4])})
    mean = weighted_mean([(1.0, x), (3.0, 3 * x)])
    assert isinstance(mean, Params)
    assert (x + mean)["steps"].tolist() == [4]
    assert mean["w"].tolist() == [2.5, 5.0]
    assert mean["steps"].tolist() == [4]
    assert (x + mean)["w"].tolist() == [3.5, 7.0]
    assert not hasattr(mean, "nothing")
    with pytest.raises(KeyError, match="names differ"):
        Params({"v": torch.ones(2)}) + weighted_mean([(1.0, x)])


def test_a_mean_accepts_no_term_after_its_result():
    mean, x = RunningMean(), Params({"w": torch.ones(2)})
    mean.add(1.0, x)
    assert mean.result() is mean.result()
    with pytest.raises(RuntimeError, match="after the mean"):
        mean.add(1.0, x)


# --- buffers ----------------------------------------------------------------------------------------------------------


def test_a_buffer_serves_again_only_when_nothing_sees_it():
    gc.collect()
    buffers._free.clear()
    count = buffers.LARGE // 4
    x = buffers.empty(count, torch.float32)
    assert x.data_ptr() % 64 == 0
    at = x.data_ptr()
    view, array = x[7:9], x.view(torch.uint8).numpy()[:5]
    del x
    others = [buffers.empty(count, torch.float32)]
    del view
    others.append(buffers.empty(count, torch.float32))
    assert all(o.data_ptr() != at for o in others)
    assert not buffers._free
    del array
    assert len(buffers._free) == 1
    assert buffers.empty(count + 1, torch.float32).data_ptr() != at
    assert buffers.empty(count // 2, torch.float64).data_ptr() == at  # as many bytes
    del others
    assert len(buffers._free) <= buffers.KEPT


def test_results_of_arithmetic_do_not_share_memory_with_what_is_still_in_use():
    x = Params({"w": torch.arange(2.0 * buffers.LARGE / 4)})
    sums = [x + x for _ in range(3)]
    view = (x * 5.0)["w"][10:12]
    for _ in range(6):
        x = 0.5 * (x + x) - 0 * x
    assert all(s["w"][-1] == 2 * (len(s["w"]) - 1) for s in sums)
    assert view.tolist() == [50.0, 55.0]
    assert len(buffers._free) <= buffers.KEPT
