"""Mixtures as they travel: numbers of the paper's formulas, rounding that keeps them mixtures, strangers' messages."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mixture import make, sigma

from fedfm.core.checks import conform
from fedfm.core.wire import payload
from fedfm.errors import ClientFault
from fedfm.methods.fedpft.encoding import Packed, formula_numbers, pack, unpack
from fedfm.methods.fedpft.mixtures import COVARIANCES, Mixture


@pytest.mark.parametrize(
    ("d", "k", "c", "expected"), [(4, 2, 3, (90, 54, 36)), (192, 10, 10, (1_872_100, 38_500, 19_400))]
)
def test_numbers_by_hand(d, k, c, expected):
    """Equations (10) to (12), as in the science notes' hand checks (K components, C classes)."""
    assert tuple(c * formula_numbers(kind, d, k) for kind in ("full", "diag", "spherical")) == expected


def test_mixtures_that_do_not_belong_together_are_refused():
    for wrong in ([], [make("diag"), make("full")], [make("diag"), make("diag", d=5)]):
        with pytest.raises(ValueError, match="one covariance and dimension"):
            pack(wrong, "float16")
    with pytest.raises(ValueError, match="NaN"):
        pack([dataclasses.replace(make("diag"), means=np.full((3, 4), np.nan, np.float32))], "float16")


drawn = {
    "covariance": st.sampled_from(COVARIANCES),
    "sizes": st.lists(st.integers(1, 6), min_size=1, max_size=4),
    "d": st.integers(1, 7),
    "seed": st.integers(0, 10**6),
    "power": st.integers(-18, 6),
}


def several(covariance, sizes, d, seed, power):
    out = [make(covariance, k, d, seed + i) for i, k in enumerate(sizes)]
    size = np.float32(10.0**power)
    return [dataclasses.replace(m, means=m.means * size, scales=m.scales * size) for m in out]


@settings(max_examples=100, deadline=None)
@given(**drawn)
def test_float32_travels_as_it_is(**case):
    sent = several(**case)
    packed = pack(sent, "float32")
    assert len(packed.numbers) == sum(formula_numbers(case["covariance"], case["d"], k) for k in case["sizes"])
    for a, b in zip(sent, unpack(packed), strict=True):
        np.testing.assert_allclose(a.weights, b.weights, rtol=1e-6)
        assert abs(b.weights.sum() - 1) < 1e-12
        np.testing.assert_array_equal(a.means, b.means)
        np.testing.assert_array_equal(a.scales, b.scales)


@settings(max_examples=100, deadline=None)
@given(**drawn)
def test_float16_rounds_each_number_and_keeps_covariances_positive(**case):
    sent = several(**case)
    got = unpack(payload.decode(*_encoded(pack(sent, "float16")), Packed))
    largest = max(max(np.abs(m.means).max(), np.abs(m.scales).max()) for m in sent)
    for a, b in zip(sent, got, strict=True):
        b.check()
        np.testing.assert_allclose(a.weights, b.weights, rtol=2e-3)
        for x, y in ((a.means, b.means), (a.scales, b.scales)):
            np.testing.assert_allclose(x, y, rtol=2**-11, atol=largest * 2**-38)  # or half of the smallest number
        if case["covariance"] == "full":
            assert min(np.linalg.eigvalsh(sigma(b, k) / largest**2).min() for k in range(b.components)) > 0


def _encoded(value):
    head, pieces = payload.encode(value)
    return head, b"".join(pieces)


def test_values_beyond_float16_are_transported():
    """Means beyond 65,504, variances below 6e-8, and a standard deviation that would round to nothing."""
    means = np.array([[1e6, -3.0], [2e6, 0.5]], np.float32)
    m = Mixture(np.array([0.5, 0.5]), means, np.array([[2.0, 1e-9], [1e-4, 3]], np.float32))
    (got,) = unpack(pack([m], "float16"))
    np.testing.assert_allclose(got.means, means, rtol=1e-3)
    assert got.scales[0, 1] == pytest.approx(64 * 2**-24)  # scale 2**21 / 2**15, float16's smallest number
    for size in (1e-30, 1e-4, 1e7):
        small = Mixture(np.ones(1), np.zeros((1, 2), np.float32), np.full((1, 2), size, np.float32))
        np.testing.assert_allclose(unpack(pack([small], "float16"))[0].scales, size, rtol=1e-3)


def test_full_factors_stay_lower_triangular_and_row_by_row():
    lower = np.array([[[1.0, 0, 0], [2, 3, 0], [4, 5, 6]]], np.float32)
    packed = pack([Mixture(np.ones(1), np.zeros((1, 3), np.float32), lower)], "float16")
    assert (packed.numbers * packed.scale).tolist()[4:] == [1, 2, 3, 4, 5, 6]
    assert (unpack(packed)[0].scales == lower).all()


GOOD = pack([make("diag", 2, 3), make("diag", 1, 3)], "float16")


def _set(index, value):
    numbers = GOOD.numbers.clone()
    numbers[index] = value
    return {"numbers": numbers}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"numbers": GOOD.numbers[:-1]}, "E_SHAPE"),
        ({"numbers": GOOD.numbers[None]}, "E_SHAPE"),
        ({"numbers": GOOD.numbers.to_sparse()}, "E_SHAPE"),
        ({"numbers": GOOD.numbers.to("meta")}, "E_SHAPE"),
        ({"numbers": GOOD.numbers.double()}, "E_DTYPE"),
        ({"numbers": GOOD.numbers.to(torch.complex64)}, "E_DTYPE"),
        (_set(3, float("nan")), "E_NONFINITE"),
        (_set(3, float("-inf")), "E_NONFINITE"),
        (_set(0, -0.25), "E_WEIGHT"),
        (_set(0, 3.0), "E_WEIGHT"),
        (_set(-1, 0.0), "E_WEIGHT"),
        (_set(-1, -1.0), "E_WEIGHT"),
        ({"scale": 0.0}, "E_WEIGHT"),
        ({"scale": -1.0}, "E_WEIGHT"),
        ({"scale": 5e-324}, "E_WEIGHT"),
        ({"scale": float("nan")}, "E_NONFINITE"),
        ({"scale": 1e300}, "E_NONFINITE"),
        ({"scale": 10**400}, "E_NONFINITE"),
        ({"scale": 1e30}, "E_NORM"),
        ({"scale": 1e4}, "E_NORM"),
        (_set(3, 32768.0) | {"scale": 1024.0}, "E_NORM"),
        ({"dim": 0}, "E_SIZE"),
        ({"dim": -3}, "E_SIZE"),
        ({"dim": 10**5000}, "E_SIZE"),
        ({"dim": 4}, "E_SHAPE"),
        ({"components": []}, "E_SIZE"),
        ({"components": [3, 0]}, "E_SIZE"),
        ({"components": [4, -1]}, "E_SIZE"),
        ({"components": [10**5000]}, "E_SIZE"),
        ({"covariance": "tied"}, "E_FIELD"),
        ({"covariance": "full"}, "E_SHAPE"),
    ],
)
def test_malformed_messages_are_the_clients_fault(change, code):
    with pytest.raises(ClientFault) as fault:
        unpack(dataclasses.replace(GOOD, **change))
    assert fault.value.code == code
    assert len(str(fault.value)) < 200


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": GOOD.numbers.tolist()},
        {"scale": "1"},
        {"dim": 3.0},
        {"dim": True},
        {"components": [2.0, 1]},
        {"components": 3},
        {"covariance": ["diag"]},
    ],
)
def test_fields_of_other_types_are_the_clients_fault(change):
    """A reply and a payload reach ``unpack`` by ``conform``."""
    with pytest.raises(ClientFault, match="E_FIELD"):
        unpack(conform(dataclasses.replace(GOOD, **change), Packed))


def test_a_reply_that_is_not_a_packed_mixture_is_a_client_fault():
    for what in (None, "text", {"components": [1]}, make("diag")):
        with pytest.raises(ClientFault, match="E_FIELD"):
            unpack(conform(what, Packed))


numbers = st.one_of(
    st.lists(st.floats(width=16), max_size=24).map(lambda v: torch.tensor(v, dtype=torch.float16)),
    st.lists(st.floats(-2, 2, width=16), max_size=24).map(lambda v: torch.tensor(v, dtype=torch.float32)),
    st.sampled_from([GOOD.numbers, GOOD.numbers.bfloat16(), torch.zeros(3, dtype=torch.int64), None, []]),
)
junk = st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.none(), st.booleans(), st.binary(max_size=3))


@pytest.mark.proof
@settings(max_examples=300, deadline=None)
@given(
    components=st.one_of(st.lists(st.integers(-1, 4), max_size=3), st.lists(junk, max_size=3), junk),
    covariance=st.one_of(st.sampled_from(COVARIANCES), junk),
    dim=st.one_of(st.integers(-1, 5), junk),
    scale=st.one_of(st.floats(0, 2), junk),
    values=numbers,
)
def test_whatever_a_stranger_sends_is_mixtures_or_the_clients_fault(components, covariance, dim, scale, values):
    try:
        got = unpack(conform(Packed(components, covariance, dim, scale, values), Packed))
    except ClientFault:
        return
    for m in got:
        m.check()
