"""The polynomials against the functions, published values, and a count of their multiplications."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedfm.encrypted.student.folding import _Watched
from fedfm.encrypted.student.polynomials import Exponential, Inverse, InverseSquareRoot, Quadratic


@dataclass(frozen=True)
class Leveled:
    """A number that counts the multiplications behind it; sums, -1 and copies are free, as with ciphertexts."""

    value: float
    level: int = 0

    def __add__(self, other: Leveled | float) -> Leveled:
        if isinstance(other, Leveled):
            return Leveled(self.value + other.value, max(self.level, other.level))
        return Leveled(self.value + other, self.level)

    def __mul__(self, other: Leveled | float) -> Leveled:
        if isinstance(other, Leveled):
            return Leveled(self.value * other.value, max(self.level, other.level) + 1)
        return Leveled(self.value * other, self.level + (other != -1))

    def square(self) -> Leveled:
        return self * self


def at(polynomial, x):
    return float(polynomial(torch.tensor(x, dtype=torch.float64)))


def test_exponentials_have_the_published_values():
    t6 = Exponential(6, 0)
    assert at(t6, 1.0) == pytest.approx(2.7180556, abs=5e-8)
    assert at(t6, -1.0) == pytest.approx(0.3680556, abs=5e-8)
    assert at(t6, -4.0) == pytest.approx(2.1555556, abs=5e-8)
    assert at(t6, -8.0) == pytest.approx(201, abs=0.5)
    assert at(Exponential(2, 3), -4.0) == pytest.approx(0.0232831, abs=5e-8)
    grid = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    assert t6(grid).min() == pytest.approx(0.149, abs=1e-3)  # positive everywhere


TABLE = {  # largest relative error on [-a, a], to the digits that the table has
    (6, 0): {1: 4.8e-4, 2: 0.15, 4: 117, 8: 6e5},
    (2, 3): {1: 2.9e-3, 2: 0.025, 4: 0.27, 8: 11},
    (2, 4): {1: 6.8e-4, 2: 5.7e-3, 4: 0.052, 8: 0.62},
    (6, 2): {1: 6e-8, 2: 9.6e-6, 4: 1.9e-3, 8: 0.75},
    (6, 3): {1: 8e-10, 2: 1.2e-7, 4: 1.9e-5, 8: 3.8e-3},
}


@pytest.mark.parametrize(("form", "errors"), TABLE.items())
def test_errors_of_exponentials(form, errors):
    for a, stated in errors.items():
        polynomial = Exponential(*form, interval=(-float(a), float(a)))
        x = np.linspace(-a, a, 2001)
        found = np.abs(polynomial(torch.from_numpy(x)).numpy() / np.exp(x) - 1).max()
        assert found == pytest.approx(stated, rel=0.12)
        assert polynomial.error() == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize(("degree", "squarings", "levels"), [(6, 0, 3), (2, 3, 4), (2, 4, 5), (6, 2, 5), (6, 3, 6)])
def test_levels_of_exponentials(degree, squarings, levels):
    polynomial = Exponential(degree, squarings)
    assert polynomial.depth == levels
    a, b = polynomial.fold
    got = polynomial.evaluate_folded(Leveled(a * 0.7 + b))
    assert got.level == levels
    assert got.value == pytest.approx(at(polynomial, 0.7), rel=1e-12)


@pytest.mark.parametrize("degree", [4, 8, 10, 16])
def test_taylor_polynomials_of_any_even_degree(degree):
    polynomial = Exponential(degree, 0)
    for x in (-2.3, 0.4, 3.1):
        assert at(polynomial, x) == pytest.approx(sum(x**i / math.factorial(i) for i in range(degree + 1)), rel=1e-12)
    assert polynomial.evaluate_folded(Leveled(0.3)).level == math.ceil(math.log2(degree + 1)) == polynomial.depth


def test_odd_degrees_are_refused():
    with pytest.raises(ValueError, match="even"):
        Exponential(5, 0)


def test_inverses_have_the_published_values():
    assert at(Inverse(2, scale=1.0), 0.5) == 1.9921875
    paper = Inverse(7, scale=1.0)
    assert at(paper, 0.01) == pytest.approx(92.36850, abs=5e-6)
    assert at(paper, 1.98) == pytest.approx(0.5021849, abs=5e-8)
    assert at(paper, 2.0) == 0


@given(st.floats(0.001, 1.999), st.integers(0, 7))
def test_the_relative_error_of_an_inverse_is_exact(x, steps):
    assert 1 - x * at(Inverse(steps, scale=1.0), x) == pytest.approx((1 - x) ** 2 ** (steps + 1), abs=1e-12)


@pytest.mark.parametrize(("steps", "widest"), [(3, 4.7), (4, 9.3), (5, 18.5), (6, 37), (7, 74)])
def test_ranges_of_inverses(steps, widest):
    assert Inverse(steps, (0.5, 0.5 * widest)).error() == pytest.approx(1e-3, rel=0.05)
    m, big = 3.0, 3.0 * widest
    polynomial, x = Inverse(steps, (m, big)), np.linspace(m, big, 1001)
    found = np.abs(x * polynomial(torch.from_numpy(x)).numpy() - 1).max()
    assert found == pytest.approx(polynomial.error(), rel=1e-3)
    assert polynomial.evaluate_folded(Leveled(1.2)).level == steps + 1 == polynomial.depth


@given(st.floats(65.0, 60000.0), st.floats(-3.0, 3.0))
def test_a_wide_inverse_has_no_value_far_above_the_root_of_its_ratio(ratio, power):
    low = 10.0**power
    interval = (low, low * ratio)
    steps = next(k for k in range(1, 64) if Inverse(k, interval).error() <= 5e-3)
    polynomial, x = Inverse(steps, interval), np.geomspace(*interval, 301)
    np.testing.assert_allclose(polynomial(torch.from_numpy(x)).numpy() * x, 1, atol=6e-3)
    assert polynomial.start == 2.0 ** round(math.log2(polynomial.start)) < 1
    most = [0.0]
    polynomial.evaluate_folded(_Watched(polynomial.fold[0] * x, most))
    assert most[0] < math.sqrt(2 * ratio)
    assert 2 * polynomial.lift <= max(most[0], 2)  # a lifted argument is within the bound of the masks
    assert polynomial.evaluate_folded(Leveled(1.2)).level == steps + 1 == polynomial.depth


def test_a_narrow_inverse_starts_at_one():
    assert Inverse(7, (1.0, 64.0)).start == Inverse(0, (1.0, 4096.0)).start == 1.0


@pytest.mark.parametrize(
    ("r", "steps", "stated"), [(4, 2, 1.8e-4), (8, 2, 3.6e-3), (16, 3, 8e-4), (64, 4, 4e-3), (3000, 9, 2e-4)]
)
def test_errors_of_inverse_square_roots(r, steps, stated):
    polynomial = InverseSquareRoot(steps, (0.3, 0.3 * r))
    x = np.geomspace(0.3, 0.3 * r, 20_001)
    found = np.abs(np.sqrt(x) * polynomial(torch.from_numpy(x)).numpy() - 1).max()
    assert found == pytest.approx(stated, rel=0.15)
    assert polynomial.error() == pytest.approx(found, rel=1e-3)
    assert polynomial.evaluate_folded(Leveled(0.5)).level == 1 + 2 * steps == polynomial.depth


def test_inverse_square_roots_have_the_published_values():
    p, q = InverseSquareRoot(2, (1.0, 4.0)).line
    assert (p, q) == (pytest.approx(1.0650756, abs=5e-8), pytest.approx(0.1521537, abs=5e-8))
    values = [at(InverseSquareRoot(k, (1.0, 4.0)), 1.0) for k in range(3)]
    assert values == pytest.approx([0.9129219, 0.9889563, 0.9998177], abs=5e-8)
    beyond = InverseSquareRoot(2, (1.0, 4.0))
    assert at(beyond, p / q * 1.01) < 0  # the start is negative there, and the root wrong


def test_quadratics_have_the_published_values():
    paper = Quadratic()
    assert (at(paper, -1.0), at(paper, 2.0)) == (pytest.approx(0.375), pytest.approx(1.5))
    a, b = paper.fold
    got = paper.evaluate_folded(Leveled(a * 2 + b))
    assert (got.value, got.level) == (pytest.approx(1.5), 1)


@given(st.floats(1.0, 60.0), st.floats(0.01, 100.0))
def test_the_fewest_steps_within_an_error(ratio, low):
    interval = (low, low * ratio)
    for kind in (Inverse, InverseSquareRoot):
        polynomial = kind.within(5e-3, interval)
        assert polynomial.error() <= 5e-3
        assert polynomial.steps == 1 or kind(polynomial.steps - 1, interval).error() > 5e-3


def test_too_wide_intervals_are_refused():
    for kind in (Inverse, InverseSquareRoot):
        with pytest.raises(ValueError, match="ratio is above 64"):
            kind.within(5e-3, (1.0, 65.0))
        with pytest.raises(ValueError, match="0 < low"):
            kind(2, (0.0, 1.0))


def test_values_outside_an_interval_are_found():
    x = torch.tensor([-9.0, -8.0, 0.0, 8.5, math.nan])
    assert Exponential(2, 3).outside(x).tolist() == [True, False, False, True, True]
