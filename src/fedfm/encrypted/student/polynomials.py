"""Polynomials for exp, 1/x, 1/sqrt(x) and GELU, for models that compute on encrypted values.

Each class computes its polynomial by sums and products only. It works on tensors, and on any object with ``+``, ``*``
(by an object of its own kind or by a number) and ``square()``, such as an array of ciphertexts. The polynomials come
from BlindFed (arXiv:2502.01289, equations 1 to 3, Algorithm 1). Scaling, squaring and the initial value for the square
root are ours.

An affine map before a polynomial costs nothing if it is folded into the weights of the layer before. So each class
separates this map (:attr:`~Polynomial.fold`) from the other operations (:meth:`~Polynomial.evaluate_folded`), whose
multiplicative depth is :attr:`~Polynomial.depth`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from torch import Tensor

_COARSE = 2  # number of last steps of 1/x whose noise matters little
WIDEST = 64.0  # largest ratio M / m of an interval for 1/x and 1/sqrt(x)


class Arithmetic(Protocol):
    """The operations that a polynomial needs from its argument."""

    def __add__(self, other: Any, /) -> Self: ...
    def __mul__(self, other: Any, /) -> Self: ...
    def square(self) -> Self: ...


X = TypeVar("X", bound=Arithmetic)


def _square(x: X) -> X:
    return x.square()


class Polynomial(ABC):
    """A polynomial and the interval on which it is valid.

    Attributes:
        interval: (low, high) of the argument. Outside the interval the polynomial may differ strongly from its
            function.
    """

    interval: tuple[float, float]

    @property
    @abstractmethod
    def depth(self) -> int:
        """Number of sequential multiplications in :meth:`evaluate_folded`, including products with constants."""

    @property
    def fold(self) -> tuple[float, float]:
        """(a, b): the argument of :meth:`evaluate_folded` is a x + b."""
        return 1.0, 0.0

    @abstractmethod
    def evaluate_folded(self, u: X) -> X:
        """Return the value at x, given u = a x + b."""

    def evaluate(self, x: X) -> X:
        """Return the value at x; the affine map :attr:`fold` takes one more multiplication."""
        a, b = self.fold
        u = x if a == 1.0 else x * a
        return self.evaluate_folded(u if b == 0.0 else u + b)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the value at every entry of a tensor."""
        return self.evaluate(x)

    def outside(self, x: Tensor) -> Tensor:
        """Return a mask of the entries of x that are outside the interval or NaN."""
        low, high = self.interval
        return ~((x >= low) & (x <= high))


@dataclass(frozen=True)
class Exponential(Polynomial):
    """The exponential function by T_d(x / 2^r)^(2^r); T_d is the Taylor polynomial at 0 (equation 1: d = 6, r = 0).

    The computation takes r levels, plus one level for T_2, or plus ceil(log2(d + 1)) levels for other degrees.

    Raises:
        ValueError: the degree is odd or below 2. A Taylor polynomial of odd degree has a real root, so it has negative
            values.
    """

    degree: int = 2
    squarings: int = 3
    interval: tuple[float, float] = (-8.0, 8.0)

    def __post_init__(self) -> None:
        if self.degree < 2 or self.degree % 2 or self.squarings < 0:
            raise ValueError(f"exp of degree {self.degree}, {self.squarings} squarings: expected an even degree")

    @property
    def depth(self) -> int:
        return (1 if self.degree == 2 else math.ceil(math.log2(self.degree + 1))) + self.squarings

    @property
    def fold(self) -> tuple[float, float]:
        unit = 0.5**self.squarings
        # T_2(u) = ((u + 1)^2 + 1) / 2 = ((u + 1) / sqrt 2)^2 + 1/2: one square, no other product.
        return (unit / math.sqrt(2), 1 / math.sqrt(2)) if self.degree == 2 else (unit, 0.0)

    def evaluate_folded(self, u: X, again: Callable[[X], X] = _square, last: Callable[[X], X] = _square) -> X:
        """Return the value for the folded argument; ``last`` computes the last square, ``again`` those before it."""
        if self.degree == 2:
            y = (again if self.squarings else last)(u) + 0.5
        else:
            y = power_series([1 / math.factorial(i) for i in range(self.degree + 1)], u)
        for left in range(self.squarings - 1, -1, -1):
            y = (again if left else last)(y)
        return y

    def error(self) -> float:
        """Return the largest relative error; it is at an end of the interval, since exp(-u) T_d(u) is decreasing."""
        return max(abs(self.evaluate(_Number(x)).value / math.exp(x) - 1) for x in self.interval)


@dataclass(frozen=True)
class Inverse(Polynomial):
    """The function 1/x for 0 < x < 2 by Goldschmidt's iteration (equation 3, Algorithm 1); ``scale`` is folded into x.

    Start with a = 2 - x, b = 1 - x; then repeat ``steps`` times: b <- b^2, a <- a (1 + b). The relative error is
    (1 - x)^(2^(steps + 1)). The default scale is 2 / (m + M) for the interval [m, M], which makes the error equal at
    both ends. If M / m is above :data:`WIDEST`, a starts at :attr:`start` times 2 - x, so that it ends between
    sqrt(m / M) and sqrt(M / m): masks of refreshes grow with the largest value.
    """

    steps: int = 4
    interval: tuple[float, float] = (0.4, 1.6)
    scale: float | None = None

    def __post_init__(self) -> None:
        _positive(self.interval)

    @property
    def _scale(self) -> float:
        return 2 / sum(self.interval) if self.scale is None else self.scale

    @property
    def start(self) -> float:
        """The power of two by which :meth:`evaluate_folded` multiplies its result; 1 for narrow intervals."""
        ratio = self.interval[1] / self.interval[0]
        return 1.0 if ratio <= WIDEST or not self.steps else 2.0 ** -round(math.log2(ratio) / 2)

    @property
    def lift(self) -> int:
        """By how much u, below 2, and b, below 1, may be multiplied and stay below the largest value inside; up to 16.

        The noise of a refresh of u is that of the relative error times u, and the same of b, but half of it after each
        step. So with a wide interval they are refreshed at a larger scale.
        """
        return min(max(int(1 / (16 * self.start)), 1), 16)

    @property
    def depth(self) -> int:
        return self.steps + 1

    @property
    def fold(self) -> tuple[float, float]:
        return self._scale, 0.0

    def evaluate_folded(self, u: X) -> X:
        """Return ``start`` / u for the scaled argument u; the caller multiplies by the scale over ``start``."""
        renew(u, lift=self.lift)
        minus, start = u * -1, self.start
        a, b = (minus if start == 1.0 else minus * start) + 2.0 * start, minus + 1.0
        for left in range(self.steps - 1, -1, -1):
            b = b.square()
            renew(b, a, lift=self.lift if left >= _COARSE else 1)
            a = a * (b + 1.0)
        return a

    def evaluate(self, x: X) -> X:
        c = self._scale
        y, back = self.evaluate_folded(x if c == 1.0 else x * c), c / self.start
        return y if back == 1.0 else y * back

    def error(self) -> float:
        """Largest relative error in the interval."""
        start: float = max(abs(1 - self._scale * x) for x in self.interval)
        return float(start ** float(2 ** (self.steps + 1)))

    @classmethod
    def within(cls, error: float, interval: tuple[float, float], least: int = 1) -> Inverse:
        """Choose the smallest number of steps, from ``least`` on, that gives an error of at most ``error``.

        Raises:
            ValueError: M / m is above :data:`WIDEST`.
        """
        return next(p for p in (cls(s, _narrow(interval)) for s in range(least, 64)) if p.error() <= error)


@dataclass(frozen=True)
class InverseSquareRoot(Polynomial):
    """The function 1/sqrt(v) by Newton's iteration, which starts from a straight line.

    Let z = v / m, which is in [1, R]. Start with y = p - q z; then repeat ``steps`` times: y <- y (3 - z y^2) / 2. The
    result is y / sqrt(m). The line is chosen so that the errors after the first step are equal at both ends and at the
    turning point. The computation takes 1 + 2 * ``steps`` levels.

    Raises:
        ValueError: the interval is not positive.
    """

    steps: int = 2
    interval: tuple[float, float] = (0.5, 2.0)

    def __post_init__(self) -> None:
        _positive(self.interval)

    @property
    def line(self) -> tuple[float, float]:
        """The coefficients (p, q) of the line at the start."""
        r = self.interval[1] / self.interval[0]
        s = r + math.sqrt(r) + 1
        rho = 2 / 3 * math.sqrt(s / 3) * s / (s - 1)
        t = math.sqrt(3 / (1 + rho + rho**2))
        return t * s / (s - 1), t / (s - 1)

    @property
    def depth(self) -> int:
        return 1 + 2 * self.steps

    def evaluate_folded(self, u: X) -> X:
        m, (p, q) = self.interval[0], self.line
        ratio = self.interval[1] / m
        # s y takes the place of y, and z / s^2 that of z: of a wide interval both then stay near the root of the ratio.
        s = 1.0 if ratio <= WIDEST else 2.0 ** round(math.log2(ratio) / 4)
        last = 1 / (math.sqrt(m) * s)  # folded into the last step
        if not self.steps:
            return u * (-q / m * last * s) + p * last * s
        y, half = u * (-q / m * s) + p * s, u * (-0.5 / m / s**2)
        for step in range(self.steps):
            c = last if step == self.steps - 1 else 1.0
            h = half * c if c != 1.0 else half
            renew(y, h)
            # y (3 - z y^2) / 2 = 1.5 y - (z / 2) y y^2: two levels
            left, right = h * y, y.square()
            renew(left, right)
            y = y * (1.5 * c) + left * right
        return y

    def error(self) -> float:
        """Return the largest relative error.

        In each step, the line's errors e at three points change by e <- e^2 (3 - e) / 2; the largest one is returned.
        """
        p, q = self.line
        r = self.interval[1] / self.interval[0]
        turn = p / (3 * q)  # the maximum of sqrt(z) (p - q z)
        worst = 0.0
        for z in (1.0, r, *((turn,) if 1 < turn < r else ())):
            g = math.sqrt(z) * (p - q * z)
            for _ in range(self.steps):
                g = g * (3 - g * g) / 2
            worst = max(worst, abs(1 - g))
        return worst

    @classmethod
    def within(cls, error: float, interval: tuple[float, float], widest: float = WIDEST) -> InverseSquareRoot:
        """Choose the smallest number of steps with an error of at most ``error``.

        Raises:
            ValueError: M / m is above ``widest``.
        """
        return next(p for p in (cls(k, _narrow(interval, widest)) for k in range(1, 64)) if p.error() <= error)


@dataclass(frozen=True)
class Quadratic(Polynomial):
    """The polynomial a x^2 + b x + c with a > 0, for GELU (equation 2: 0.125, 0.25, 0.5). It takes one level.

    Raises:
        ValueError: a is not positive.
    """

    a: float = 0.125
    b: float = 0.25
    c: float = 0.5
    interval: tuple[float, float] = (-6.0, 6.0)

    def __post_init__(self) -> None:
        if not self.a > 0:
            raise ValueError(f"quadratic with a = {self.a}: expected a > 0")

    @property
    def depth(self) -> int:
        return 1

    @property
    def fold(self) -> tuple[float, float]:
        root = math.sqrt(self.a)
        return root, self.b / (2 * root)

    def evaluate_folded(self, u: X) -> X:
        return u.square() + (self.c - self.b**2 / (4 * self.a))


def power_series(coefficients: list[float], u: X) -> X:
    """Sum c_i u^i up to degree d >= 2, in ceil(log2(d + 1)) levels, by the method of Paterson and Stockmeyer."""
    powers = {1: u}
    while 2 * max(powers) < len(coefficients):
        powers[2 * max(powers)] = powers[max(powers)].square()

    def part(c: list[float]) -> Any:
        if len(c) == 1:
            return c[0]
        if len(c) == 2:
            return u * c[1] + c[0]
        half = max(p for p in powers if p < len(c))
        return powers[half] * part(c[half:]) + part(c[:half])

    return part(coefficients)  # type: ignore[no-any-return]


def renew(first: X, *others: X, lift: int = 1) -> None:
    """Refresh all ciphertexts of the next product with one message, if one of them has no level left.

    The first one gets ``lift`` times less noise; its values times ``lift`` have to be within the bound of the masks.
    """
    if (renew := getattr(first, "renew_with", None)) is not None:
        renew(*others, lift=lift)


@dataclass(frozen=True)
class _Number:
    """A float that has a square() method."""

    value: float

    def __add__(self, other: Any) -> _Number:
        return _Number(self.value + _value(other))

    def __mul__(self, other: Any) -> _Number:
        return _Number(self.value * _value(other))

    def square(self) -> _Number:
        return _Number(self.value * self.value)


def _value(x: Any) -> float:
    return x.value if isinstance(x, _Number) else float(x)


def _positive(interval: tuple[float, float]) -> None:
    if not 0 < interval[0] <= interval[1] < math.inf:
        raise ValueError(f"interval {interval}: expected 0 < low <= high")


def _narrow(interval: tuple[float, float], widest: float = WIDEST) -> tuple[float, float]:
    _positive(interval)
    if interval[1] / interval[0] > widest:
        raise ValueError(f"values from {interval[0]:.3g} to {interval[1]:.3g}; their ratio is above {widest:g}")
    return interval
