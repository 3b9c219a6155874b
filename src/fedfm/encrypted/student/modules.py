"""Softmax, LayerNorm and GELU as modules, which compute the exact function until they have a polynomial.

Each module keeps the weights of the module that it replaces, under the same names. In training, the module clamps the
argument of its polynomial to the interval, and adds a penalty on arguments beyond 80 % of the interval. In evaluation
it does not clamp, since encrypted values cannot be clamped, but counts the arguments outside the interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.encrypted.student.neuron_polynomials import NeuronGelu
from fedfm.encrypted.student.polynomials import Exponential, Inverse, InverseSquareRoot, Polynomial, Quadratic
from fedfm.models.derived_modules import Bounded

ATTENTION = "fedfm_polynomial"  # name in transformers' registry of attention functions
HINGE = 0.8  # the penalty grows beyond this fraction of the distance from the middle of the interval to its end
NO_KEY = -math.inf  # score of a masked key in the exact softmax


class Replaced(Bounded):
    """The base class of the three modules.

    Attributes:
        recording: whether to keep the last arguments in ``seen``, for penalties and measurements.
        seen: the last values of each argument, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recording = False
        self.seen: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Reset the counts, and drop recorded arguments."""
        self.seen, self.penalty, self.outside, self.total = {}, None, 0, 0

    def _record(self, name: str, x: Tensor) -> None:
        if self.recording:
            self.seen[name] = x

    def _take(self, polynomial: Polynomial, x: Tensor, among: Tensor | None = None) -> Tensor:
        """Clamp a polynomial's argument in training; count its entries outside the interval in evaluation.

        Only the entries that the mask ``among`` selects are counted.
        """
        if not self.training:
            outside = polynomial.outside(x.detach())
            if among is not None:
                outside = outside & among
            self.outside += int(outside.sum())
            self.total += x.numel() if among is None else int(among.expand_as(x).sum())
            return x
        if self.hinged:
            excess = (_place(polynomial, x) - HINGE).clamp_min(0).square()
            if among is not None:
                excess = excess * among
            self.penalty = excess.mean() if self.penalty is None else self.penalty + excess.mean()
        return x.clamp(*polynomial.interval)


def _place(polynomial: Polynomial, x: Tensor) -> Tensor:
    """Return the distance from the interval's middle, divided by half its length.

    For 1 / x and 1 / sqrt(x), distance and length are computed from logarithms.
    """
    low, high = polynomial.interval
    if isinstance(polynomial, (Inverse, InverseSquareRoot)):
        low, high, x = math.log(low), math.log(high), x.clamp_min(low * 1e-3).log()
    return (x - (low + high) / 2).abs() / ((high - low) / 2)


class PolynomialSoftmax(Replaced):
    """Computes attention weights: by softmax, or by polynomials for exp / sum(exp).

    Keys are centred over the tokens, so that scores spread around zero; this does not change the softmax. Of a model
    that computes on encrypted tokens, they are centred over the places, where the first ``copies`` tokens count twice.

    Attributes:
        exponential, inverse: the polynomials; if both are None, the softmax is exact. If only ``exponential`` is set,
            its row sums are recorded.
        copies: number of places that hold a copy of a token.
        filled: whether masked places hold copies of tokens, too; if so, keys are centred over all places.
        offset: (heads, d / heads), or zeros (heads, 1), added to the centred keys. It adds a linear function of the
            query to all scores of a row, which does not change the softmax, but brings the row sums closer together.
        shift: (heads,), added to all scores of a head, which changes no softmax either.
        scales: (heads,), factors that multiply the row sums before ``inverse``, and then the results of ``inverse``.
    """

    scales: Tensor
    offset: Tensor
    shift: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.exponential: Exponential | None = None
        self.inverse: Inverse | None = None
        self.copies, self.filled = 0, False
        self.register_buffer("scales", torch.ones(heads), persistent=False)
        self.register_buffer("offset", torch.zeros(heads, 1), persistent=False)
        self.register_buffer("shift", torch.zeros(heads), persistent=False)

    def forward(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Compute attention weights (n, heads, T, T) from query and key (n, heads, T, d / heads).

        ``mask`` (n, 1, T or 1, T) is true for the keys that count; None if all keys count.
        """
        if mask is None or self.filled:
            key = key - mean_over_places(key, self.copies)
        else:
            real = mask[:, :, -1, :, None].to(key.dtype)
            key = key - (key * real).sum(-2, keepdim=True) / real.sum(-2, keepdim=True).clamp_min(1)
        key = key + self.offset.to(key.dtype)[:, None]
        scores = wide((query * scaling) @ key.transpose(-1, -2)) + self.shift[:, None, None]
        self._record("scores", scores)
        self._record("query", query * scaling)
        masked = scores if mask is None else scores.masked_fill(~mask, NO_KEY)
        if self.exponential is None:
            if self.recording:
                self._record("log_sums", masked.logsumexp(-1, keepdim=True))
            return masked.softmax(-1).to(query.dtype)
        taken = (
            scores if mask is None else scores.masked_fill(~mask, 0.0)
        )  # scores of masked keys become 0, so that they do not overflow
        powers = self.exponential(self._take(self.exponential, taken, mask))
        if mask is not None:
            powers = powers * mask
        sums = powers.sum(-1, keepdim=True)
        self._record("sums", sums)
        if self.inverse is None:
            return masked.softmax(-1).to(query.dtype)
        c = self.scales.to(powers.dtype)[:, None, None]
        sums = self._take(self.inverse, sums * c)
        return (powers * (self.inverse.evaluate_folded(sums) * (c / self.inverse.start))).to(query.dtype)


def mean_over_places(key: Tensor, copies: int) -> Tensor:
    """Return the mean (..., 1, d) of keys (..., T, d) over the tokens; the first ``copies`` tokens count twice."""
    if not copies:
        return key.mean(-2, keepdim=True)
    total = key.sum(-2, keepdim=True) + key[..., :copies, :].sum(-2, keepdim=True)
    return total / (key.shape[-2] + copies)


class PolynomialNorm(Replaced):
    """LayerNorm, exact or with a polynomial in place of 1 / sqrt of the variance.

    If ``Inverse`` takes the place of ``InverseSquareRoot``, the norm divides by the variance itself, as in BlindFed's
    paper.
    """

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.inverse: InverseSquareRoot | Inverse | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (..., d) -> (..., d)."""
        weight, bias = self.weight, self.bias
        centred = wide(x)
        centred = centred - centred.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        self._record("variance", variance)
        if self.inverse is None:
            scale = torch.rsqrt(variance + self.eps)
        else:
            scale = self.inverse(self._take(self.inverse, variance))
        return (centred * scale).to(x.dtype) * weight + bias


class PolynomialGelu(Replaced):
    """GELU, exact, as a quadratic, or as a polynomial for each neuron."""

    def __init__(self, exact: nn.Module) -> None:
        super().__init__()
        self.exact = exact
        self.quadratic: Quadratic | NeuronGelu | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply GELU, or the polynomial, to each entry."""
        if isinstance(self.quadratic, NeuronGelu):
            t = self.quadratic.places(wide(x))
            self._record("hidden", t)
            return self.quadratic.values(self._take(self.quadratic.core, t)).to(x.dtype)
        self._record("hidden", x)
        if self.quadratic is None:
            return self.exact(x)  # type: ignore[no-any-return]
        return self.quadratic(self._take(self.quadratic, wide(x))).to(x.dtype)


@dataclass(frozen=True)
class Functions:
    """The replaced functions of one block."""

    softmax: PolynomialSoftmax
    norms: tuple[PolynomialNorm, PolynomialNorm]
    gelu: PolynomialGelu

    @classmethod
    def of(cls, block: nn.Module) -> Functions:
        """Return the replaced functions of a block, with both norms in the order of their use."""
        found = list(block.modules())
        first, second = (m for m in found if isinstance(m, PolynomialNorm))
        softmax = next(m for m in found if isinstance(m, PolynomialSoftmax))
        return cls(softmax, (first, second), next(m for m in found if isinstance(m, PolynomialGelu)))

    def __iter__(self) -> Iterator[Replaced]:
        return iter((self.softmax, *self.norms, self.gelu))


def wide(x: Tensor) -> Tensor:
    """Convert to at least float32, since polynomials lose too many bits in half precision."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention with the module's own :class:`PolynomialSoftmax`; the signature is that of transformers."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights = module.softmax(query, key, attention_mask, scaling)
    dropped = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (dropped @ value).transpose(1, 2).contiguous(), weights


def register() -> None:
    """Register :data:`ATTENTION` with transformers; a mask is true for the keys that count."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
