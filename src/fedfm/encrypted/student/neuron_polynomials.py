"""GELU as a polynomial of degree 8 that is different for every neuron, fitted by least squares.

A quadratic is close to GELU only where a model was trained to keep its pre-activations small. Degree 8 needs no
training: GELU is x / 2 plus an even function. So each neuron j gets

    f_j(x) = k_j P_j(((x - m_j) / s_j)^2) + a_j x + b_j,

with a monic P_j of degree 4, its centre m_j and its scale s_j. Under encryption, the scale and the centre are folded
into the weights before, k_j into those after. The linear terms of all neurons together are one linear map of the MLP's
input (:func:`~fedfm.encrypted.student.folding.fold_block`). P_j(v) = (y + v + c_2) y + c_3 with y = (v + c_0) v + c_1
takes two products after the square (Knuth, The Art of Computer Programming, volume 2, 4.6.4), and no product with
a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfm.encrypted.student.polynomials import Polynomial, renew

Numbers = NDArray[np.float64]
DEGREE = 8
MARGIN = 1.3  # by default, a neuron's interval is wider than its measured pre-activations by this factor
_POWERS = DEGREE // 2
_EVEN = 0.02  # fraction of the weight of the least squares that is spread evenly over the interval
_POINTS = 41  # number of these even points
_LEADING = 0.25  # smallest leading coefficient of P_j, over the largest coefficient
_RIDGE = 1e-7
_ARRAYS = ("centres", "scales", "factors", "slopes", "constants")


@dataclass(frozen=True)
class NeuronCore(Polynomial):
    """The polynomials P_j(t^2) - c_3 of all neurons, for t in ``interval``; neurons are the last axis, or ciphertexts.

    Attributes:
        shifts: c_0, c_1 and c_2, for every neuron.
    """

    shifts: tuple[tuple[float, ...], ...]
    interval: tuple[float, float] = (-1.0, 1.0)

    @property
    def depth(self) -> int:
        return 3

    def evaluate_folded(self, u: Any) -> Any:
        """Return P_j(u_j^2) - c_3 for every neuron j."""
        first, second, third = self.shifts
        v = u.square()
        renew(v)
        y = _plus(_plus(v, first) * v, second)
        renew(y)
        return _plus(y + v, third) * y


@dataclass(frozen=True)
class NeuronGelu:
    """The functions f_j of one block's neurons.

    Attributes:
        core: the polynomials.
        centres, scales, factors, slopes, constants: m, s, k, a, and b + k c_3, (neurons,) each.
    """

    core: NeuronCore
    centres: Numbers
    scales: Numbers
    factors: Numbers
    slopes: Numbers
    constants: Numbers
    _tensors: dict[Any, list[Tensor]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of t."""
        return self.core.interval

    @property
    def depth(self) -> int:
        """The number of sequential multiplications, as of a :class:`Polynomial`."""
        return self.core.depth

    def places(self, x: Tensor) -> Tensor:
        """Return t = (x - m) / s for pre-activations (..., neurons)."""
        centres, scales, *_ = self._as(x)
        return (x - centres) / scales

    def values(self, t: Tensor) -> Tensor:
        """Return f_j(m_j + s_j t_j)."""
        centres, scales, factors, slopes, constants = self._as(t)
        even: Tensor = self.core.evaluate_folded(t)
        return even * factors + (t * scales + centres) * slopes + constants

    def _as(self, x: Tensor) -> list[Tensor]:
        key = (x.dtype, x.device)
        if key not in self._tensors:
            self._tensors[key] = [torch.as_tensor(getattr(self, n), dtype=x.dtype, device=x.device) for n in _ARRAYS]
        return self._tensors[key]

    def to_entry(self) -> dict[str, Any]:
        """Return the fields for ``config.json``."""
        fields = {name: getattr(self, name).tolist() for name in _ARRAYS}
        return {
            "kind": "neurons",
            "interval": list(self.interval),
            "shifts": [list(s) for s in self.core.shifts],
            **fields,
        }

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> NeuronGelu:
        """Invert :meth:`to_entry`.

        Raises:
            KeyError, TypeError, ValueError: the entry is damaged.
        """
        shifts = tuple(tuple(map(float, s)) for s in entry["shifts"])
        arrays = [np.asarray(entry[name], np.float64) for name in _ARRAYS]
        if {len(x) for x in (*shifts, *arrays)} != {len(arrays[0])} or len(shifts) != 3:
            raise ValueError("the polynomials of a block's neurons have different numbers of neurons")
        low, high = map(float, entry["interval"])
        return cls(NeuronCore(shifts, (low, high)), *arrays)


def _plus(x: Any, numbers: tuple[float, ...]) -> Any:
    """Add a number for each neuron: to ciphertexts, to tensors or to arrays."""
    if isinstance(x, Tensor):
        return x + torch.tensor(numbers, dtype=x.dtype, device=x.device)
    array = np.asarray(numbers, np.float64)
    return x.plus(array) if hasattr(x, "plus") else x + array


@torch.no_grad()
def fit_neurons(
    x: Tensor, low: Tensor, high: Tensor, margin: float = MARGIN, weights: Tensor | None = None
) -> NeuronGelu:
    """Fit the polynomials to GELU at pre-activations x (n, neurons), whose extremes over all rows are low and high.

    The centre is 0 or within a standard deviation of the mean, whichever fits best. A fiftieth of the weight is spread
    evenly over the interval, so that rare arguments are not far off.

    Args:
        weights: (n,), those of the rows of x, with a mean of 1; None if all weigh the same.
    """
    x, low, high = x.double(), low.double(), high.double()
    mean, deviation = x.mean(0), x.std(0)
    wide = (high - low) * (margin - 1) / 2
    even = torch.linspace(0, 1, _POINTS, dtype=x.dtype)[:, None] * (high - low + 2 * wide) + low - wide
    points = torch.cat([x, even])
    rows = torch.ones(len(x), dtype=x.dtype) if weights is None else weights.to(x.dtype)
    weights = torch.cat([rows, torch.full((_POINTS,), len(x) * _EVEN / _POINTS)])
    target = torch.nn.functional.gelu(points)
    best: list[Tensor] = []
    for centre in (torch.zeros_like(mean), mean, mean - deviation, mean + deviation):
        scale = torch.maximum(high + wide - centre, centre - low + wide)
        found = [centre, scale, *_least_squares((points - centre) / scale, target, weights)]
        if best:
            closer = found[-1] < best[-1]
            found = [
                torch.where(closer if a.dim() == 1 else closer[:, None], b, a) for a, b in zip(best, found, strict=True)
            ]
        best = found
    centres, scales, coefficients, _ = best
    constant, slope, *powers = coefficients.T
    leading = powers[-1]
    third, second, first = (p / leading for p in reversed(powers[:-1]))  # coefficients of v^3, v^2 and v
    c0 = (third - 1) / 2
    rest = second - c0 * (c0 + 1)
    c1 = first - c0 * rest
    c2 = rest - 2 * c1
    c3 = -c1 * (c1 + c2)
    slopes = slope / scales
    constants = constant - slopes * centres + leading * c3
    shifts = tuple(tuple(c.tolist()) for c in (c0, c1, c2))
    return NeuronGelu(NeuronCore(shifts), *(a.numpy().copy() for a in (centres, scales, leading, slopes, constants)))


def _least_squares(t: Tensor, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Fit 1, t, t^2, t^4, ... (neurons, 2 + powers); return coefficients and weighted squared errors (neurons,)."""
    v = t.square()
    terms = torch.stack([torch.ones_like(t), t, *(v**i for i in range(1, _POWERS + 1))])
    coefficients = _solve(terms, target, weights)
    largest = coefficients[:, 2:].abs().amax(1)
    small = coefficients[:, -1].abs() < _LEADING * largest
    if bool(small.any()):  # fix the leading coefficient, and fit the others again
        least = torch.where(coefficients[:, -1] < 0, -1.0, 1.0) * _LEADING * largest
        others = _solve(terms[:-1], target - least * terms[-1], weights)
        coefficients = torch.where(small[:, None], torch.cat([others, least[:, None]], 1), coefficients)
    errors = target - torch.einsum("jd,dnj->nj", coefficients, terms)
    return coefficients, (errors.square() * weights[:, None]).sum(0)


def _solve(terms: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    weighted = (terms * weights[:, None]).permute(2, 0, 1)  # (neurons, terms, points)
    gram, right = weighted @ terms.permute(2, 1, 0), weighted @ target.T[..., None]
    ridge = _RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    found: Tensor = torch.linalg.solve(gram + ridge[:, None, None] * torch.eye(len(terms), dtype=gram.dtype), right)
    return found[..., 0]
