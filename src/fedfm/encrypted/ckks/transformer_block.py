"""A transformer block on encrypted tokens, for many samples at once.

A ciphertext has one feature: slot t B + s is token t of sample s, with B = N / 2 / T samples. So a linear layer is a
product of its matrix with the array of ciphertexts. A rotation by j B slots moves token t + j to token t, cyclically,
since T B is the number of slots. Attention computes the score matrix by its T diagonals. Diagonal j is written as
j = g b + i, with baby steps i and giant steps g (Halevi, Shoup. Algorithms in HElib. CRYPTO 2014, for matrices).

T is the number of places, a power of two. If a model has fewer tokens, the other places hold copies of its first
tokens, so that every argument in them is one of a real token. As keys, the copies are multiplied by zero: in the row
sums, where these are scaled anyway, and in the attention weights, on the level that is left before their refresh.

The block expects centred tokens: the weights before both norms already subtract the means, so no norm subtracts a mean.

A block whose weights have ``residual`` normalises after its sums, and knows which places hold copies only from an
encrypted mask, one more ciphertext after the features. The copies then differ from sample to sample. As keys they are
multiplied by the mask: in the row sums, and in the values in place of the attention weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks import inner_products
from fedfm.encrypted.ckks.ciphertexts import LEAST_BITS, Ciphertexts, concatenate, relinearise_and_rescale
from fedfm.encrypted.ckks.inner_products import inner, outer, product_pairs, reduce_for_product
from fedfm.encrypted.ckks.matrices import linear
from fedfm.encrypted.ckks.ring import Parameters, Residues
from fedfm.encrypted.ckks.slot_constants import encode_slots, times_slots, weighted_sum
from fedfm.encrypted.token_places import places_of
from fedfm.errors import InputError

Matrix = NDArray[np.floating[Any]]


class Folding(Protocol):
    """A polynomial p that is computed by sums, products and squares.

    p(x) = ``evaluate_folded(a x + b)``, where (a, b) is ``fold``.
    """

    @property
    def fold(self) -> tuple[float, float]:
        """(a, b), the affine map that is folded into the weights."""

    def evaluate_folded(self, u: Any, /) -> Any:
        """Return the polynomial's value p(x) for u = a x + b."""


class Powers(Folding, Protocol):
    """A polynomial for exp that ends with squares of squares."""

    def evaluate_folded(self, u: Any, /, again: Any = ..., last: Any = ...) -> Any:
        """Return the polynomial's value; ``last`` is the last square, ``again`` those before it."""


@dataclass(frozen=True)
class Packing:
    """The order of tokens and samples in the slots of a ciphertext.

    Raises:
        InputError: there are more tokens than slots.
    """

    parameters: Parameters
    tokens: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= self.parameters.slots:
            raise InputError(f"{self.tokens} tokens: expected 1 to {self.parameters.slots}")

    @property
    def places(self) -> int:
        """T, the number of tokens rounded up to a power of two, because rotations are cyclic."""
        return places_of(self.tokens)

    @property
    def samples(self) -> int:
        """B, the number of samples in a ciphertext."""
        return self.parameters.slots // self.places

    @property
    def baby(self) -> int:
        """Number of baby steps; the number of giant steps is ``places`` divided by this number."""
        return 1 << (self.places.bit_length() - 1) // 2

    @property
    def rotations(self) -> set[int]:
        """Rotation steps for which the client has to send keys."""
        giants = range(self.baby, self.places, self.baby)
        steps = {*range(1, self.baby), *giants, *(-g for g in giants)}
        return {step * self.samples for step in steps}

    def pack(self, x: Matrix) -> NDArray[np.float64]:
        """Arrange (samples, tokens, features) as (features, N / 2); copies of the first sample fill free slots."""
        samples, tokens, features = x.shape
        if tokens != self.tokens or not 1 <= samples <= self.samples:
            raise InputError(f"rows of shape {x.shape}: expected up to {self.samples} samples of {self.tokens} tokens")
        full = np.concatenate([x, np.repeat(x[:1], self.samples - samples, axis=0)]).astype(np.float64)
        full = np.concatenate([full, full[:, : self.places - tokens]], axis=1)
        return np.ascontiguousarray(full.transpose(2, 1, 0)).reshape(features, -1)

    def unpack(self, slots: Matrix, samples: int) -> NDArray[np.float64]:
        """Invert :meth:`pack` for the first ``samples`` samples."""
        x = slots.reshape(len(slots), self.places, self.samples)
        return np.ascontiguousarray(x.transpose(2, 1, 0)[:samples, : self.tokens].astype(np.float64))


@dataclass(frozen=True)
class EncryptedBlock:
    """Computes z = x + W_o attention(norm(x)), then z + W_2 gelu(W_1 norm(z)).

    With ``residual`` R and ``skip`` S it computes z = norm(R x + W_o attention(x)), then norm(S z + W_2 gelu(W_1 z)).

    Attributes:
        weights: ``query``, ``key``, ``value``, ``output`` (d, d), ``up`` (m, d), ``down`` (d, m); and biases, named
            ``*_bias``. The query includes the factor 1 / sqrt(d / heads); query, key, value and up include the scales
            and shifts of the norms; output and down subtract the mean over the features. There may be ``key_offset``
            (d,), which is added to the centred keys, ``score_shift`` (heads,), which is added to the scores, and
            ``skip`` (d, d) with its bias, which maps the MLP's input to what is added to its output, and ``residual``
            (d, d) with its bias, which does the same for the attention.
        norms: polynomials for 1 / sqrt of the variance, before the attention and before the MLP.
        exponential: polynomial for exp.
        inverse: polynomial for 1 / x, where x is the sum of a row times ``inverse_scales``.
        inverse_scales: (heads,), the factors of the row sums.
        gelu: polynomial for GELU.
        centred_keys: whether the mean over the places is subtracted from the keys, which does not change the softmax.

    Raises:
        InputError: a matrix is missing or has a wrong shape.
    """

    layout: Packing
    heads: int
    weights: Mapping[str, Matrix]
    norms: tuple[Folding, Folding]
    exponential: Powers
    inverse: Folding
    inverse_scales: Matrix
    gelu: Folding
    centred_keys: bool = True

    def __post_init__(self) -> None:
        d, m = self.features, len(self.weights["up"])
        square = ("query", "key", "value", "output")
        shapes: dict[str, tuple[int, ...]] = {"up": (m, d), "down": (d, m)}
        shapes.update(dict.fromkeys(square, (d, d)))
        shapes |= {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
        for name, shape in shapes.items():
            if name not in self.weights or self.weights[name].shape != shape:
                raise InputError(f"weights of an encrypted block: expected {name} of shape {shape}")
        if self.layout.samples % 2:  # rotations by an odd number of slots do not keep pairs
            raise InputError(f"{self.layout.places} places of tokens: a block needs two slots for each at least")
        if d % self.heads or self.inverse_scales.shape != (self.heads,):
            raise InputError(f"{d} features and {self.inverse_scales.shape} scales for {self.heads} heads")

    @property
    def features(self) -> int:
        """Number d of features."""
        return len(self.weights["query"])

    @property
    def has_mask(self) -> bool:
        """Whether a mask of the places follows the features."""
        return "residual" in self.weights

    @property
    def inputs(self) -> int:
        """Number of ciphertexts that the block maps to as many: d, and one for the mask."""
        return self.features + self.has_mask

    def __call__(self, x: Ciphertexts) -> Ciphertexts:
        """Apply the block to encrypted features (d,) -> (d,), or (d + 1,) -> (d + 1,) with a mask."""
        if len(x) != self.inputs:
            raise InputError(
                f"{len(x)} ciphertexts: expected {self.inputs}, one per feature{' and a mask' * self.has_mask}"
            )
        if self.has_mask:
            x = x.refresh()
            u, mask = x[: self.features], x[self.features :]
            mixed = linear(self.weights["output"], self.attention(u, mask), self.weights["output_bias"])
            z = self.norm(linear(self.weights["residual"], u, self.weights["residual_bias"]) + mixed, 0)
            return concatenate([self.norm(self.mlp(z), 1), mask])
        z = x + linear(self.weights["output"], self.attention(self.norm(x, 0)), self.weights["output_bias"])
        return z + self.mlp(self.norm(z, 1))

    def norm(self, x: Ciphertexts, which: int) -> Ciphertexts:
        """Divide x, which is centred, by its standard deviation. ``which`` is the index of the norm."""
        a, b = self.norms[which].fold
        variance = relinearise_and_rescale(inner(x, x)).over(len(x) / a)
        inverse: Ciphertexts = self.norms[which].evaluate_folded(variance + b if b else variance)
        return x * inverse

    def mlp(self, y: Ciphertexts) -> Ciphertexts:
        """Return W_2 gelu(W_1 y + b_1) + b_2."""
        a, b = self.gelu.fold
        hidden = linear(self.weights["up"] * a, y, self.weights["up_bias"] * a + b)
        out = linear(self.weights["down"], self.gelu.evaluate_folded(hidden), self.weights["down_bias"])
        return out + linear(self.weights["skip"], y, self.weights["skip_bias"]) if "skip" in self.weights else out

    def attention(self, y: Ciphertexts, mask: Ciphertexts | None = None) -> Ciphertexts:
        """Return the outputs of all heads, concatenated: (d,) -> (d,); the mask, if any, is one fresh ciphertext."""
        a, b = self.exponential.fold
        query = linear(self.weights["query"] * a, y, self.weights["query_bias"] * a)
        key = linear(self.weights["key"], y, self.weights["key_bias"])
        value = self._refresh_pairs(self._values(y, mask))
        scores = self._scores(self._refresh_pairs(query), self._refresh_pairs(key, -1))
        squares = inner_products.square_again, inner_products.raw_square
        powers = self.exponential.evaluate_folded(self._add_shifts(scores, a, b), *squares)
        if mask is None:
            powers = powers if self._can_sum_unreduced(powers) else reduce_for_product(powers)
            sums = self._scaled_row_sums(powers)
            powers = reduce_for_product(powers)
        else:
            powers = reduce_for_product(powers, refreshed=True)
            sums = self._masked_row_sums(powers, mask).times(self.inverse_scales)
        after = self.inverse_scales / getattr(self.inverse, "start", 1.0)
        inverses = self.inverse.evaluate_folded(sums).times(after)
        return self._mix_values(self._attention_weights(powers, inverses.refresh()), value)

    def _values(self, y: Ciphertexts, mask: Ciphertexts | None) -> Ciphertexts:
        """Return the values (d,); with a mask, those of copies are zero, and so is their bias."""
        if mask is None:
            return linear(self.weights["value"], y, self.weights["value_bias"])
        return linear(
            np.column_stack([self.weights["value"], self.weights["value_bias"]]), concatenate([y * mask, mask])
        )

    def _masked_row_sums(self, powers: Ciphertexts, mask: Ciphertexts) -> Ciphertexts:
        """Return the sums over the real keys, from an encrypted mask: (heads,)."""
        step, b = self.layout.samples, self.layout.baby
        masks = mask.rotations([i * step for i in range(b)])
        heads = self._heads(powers)
        return self._add_giants([inner(head[giant : giant + b], masks) for head in heads for giant in self._giants])

    def _add_shifts(self, scores: Ciphertexts, a: float, b: float) -> Ciphertexts:
        """Add the constant of the polynomial of exp, and the heads' own."""
        if "score_shift" not in self.weights:
            return scores + b
        return scores.plus(np.repeat(a * self.weights["score_shift"] + b, self.layout.places))

    # Diagonal g b + i of head k has the index k T + g b + i. It stays rotated by -g b places until the rows are summed.
    # So its slot t has the key of place t + i, for every g.

    @property
    def _giants(self) -> range:
        return range(0, self.layout.places, self.layout.baby)

    def _heads(self, x: Ciphertexts) -> list[Ciphertexts]:
        size = len(x) // self.heads
        return [x[k * size : (k + 1) * size] for k in range(self.heads)]

    # Queries, keys and values stay pairs of two features of a head after their refresh. So half as many are rotated and
    # multiplied. With u u = -1, (q_1 + u q_2) (k_1 - u k_2) = q_1 k_1 + q_2 k_2 + u (q_2 k_1 - q_1 k_2): the scores are
    # the real parts. A weight is real, so its products with pairs of values are pairs.

    def _refresh_pairs(self, x: Ciphertexts, sign: int = 1) -> Ciphertexts:
        """Refresh features as pairs a + ``sign`` u b of a head, at half the scale."""
        return concatenate([head.pair(sign) for head in self._heads(x)]).refresh_pairs()

    def _scores(self, query: Ciphertexts, key: Ciphertexts) -> Ciphertexts:
        """Return real scores from pairs, refreshed: (heads T,)."""
        step, heads = self.layout.samples, []
        for k, (here, there) in enumerate(zip(self._heads(query), self._heads(key), strict=True)):
            there = (there * 2).over(2.0)  # the usual scale
            columns = there.rotations([i * step for i in range(self.layout.baby)])
            if "key_offset" in self.weights:
                columns = concatenate([columns, self._offsets(k, there)])
            turned = here.rotations([-giant * step for giant in self._giants])
            heads.append(relinearise_and_rescale(outer(turned, columns, len(here))))
        scores = self._centre_scores(concatenate(heads))
        # conj(a - u b) = conj(a) + u conj(b), so one conjugation gives the real parts of two ciphertexts.
        twice = scores.pair() + scores.evaluator.conjugate(scores.pair(-1))
        return twice.over(2.0).refresh_pairs().unpair(len(scores))

    def _offsets(self, head: int, like: Ciphertexts) -> Ciphertexts:
        """Return a head's part of ``key_offset`` as one more column of keys."""
        values = np.split(self.weights["key_offset"], self.heads)[head]
        nothing = np.zeros((len(values), *like.limbs.shape[1:]), np.uint64)
        return Ciphertexts(nothing, like.scale, like.evaluator).plus(values).pair(-1)

    def _centre_scores(self, scores: Ciphertexts) -> Ciphertexts:
        """Centre each row over the places, as if the keys were centred, and add the products with the offsets."""
        giants, b, factor = len(self._giants), self.layout.baby, self.layout.places if self.centred_keys else 1
        rows = np.arange(self.heads * giants)
        columns = len(scores) // len(rows)
        if columns == b and not self.centred_keys:
            return scores
        real = scores[(rows[:, None] * columns + np.arange(b)).reshape(-1).tolist()]
        shifts = []
        if self.centred_keys:
            sums = self._row_sums(real).rotations([-giant * self.layout.samples for giant in self._giants])
            shifts.append(-sums[(rows % giants * self.heads + rows // giants).tolist()])
        if columns > b:
            shifts.append(_times_whole(scores[(rows * columns + b).tolist()], factor))
        shift = shifts[0] if len(shifts) == 1 else shifts[0] + shifts[1]
        return (_times_whole(real, factor) + shift[rows.repeat(b).tolist()]).over(factor)

    def _masks(self, x: Ciphertexts, scale: float, factor: float = 1.0) -> Residues:
        """Encode ``factor`` at the keys of tokens and zero at those of copies, for each baby step: (b, primes, N)."""
        place = np.arange(self.layout.places)
        keys = (place + np.arange(self.layout.baby)[:, None]) % self.layout.places
        values = np.where(keys < self.layout.tokens, factor, 0.0)
        return encode_slots(np.repeat(values, self.layout.samples, axis=1), x.level + 1, scale, x.evaluator.ring)

    # Where the powers of a row are small, the inverse of their sum is large. So they are summed as unreduced products,
    # before each of them has the noise of a relinearisation and a rescaling.

    def _scaled_row_sums(self, powers: Ciphertexts) -> Ciphertexts:
        """Return the sums over the tokens' keys, times ``inverse_scales``: (heads,)."""
        if self.layout.places == self.layout.tokens:
            return self._row_sums(powers).times(self.inverse_scales)
        if powers.limbs.shape[1] == 3:
            x, scale = powers, self._scale_of_masks(powers)
        else:
            x = powers.for_plain(float(np.abs(self.inverse_scales).min()))
            scale = x.plain_scale()
        b, parts = self.layout.baby, []
        for head, factor in zip(self._heads(x), self.inverse_scales, strict=True):
            masks = self._masks(x, scale, float(factor))
            parts += [weighted_sum(head[giant : giant + b], masks, scale) for giant in self._giants]
        return x.evaluator.rescale(self._add_giants(parts))

    def _can_sum_unreduced(self, powers: Ciphertexts) -> bool:
        """Whether unreduced powers have primes for their own rescaling and for that of the masks of copies."""
        if powers.limbs.shape[1] == 2 or self.layout.places == self.layout.tokens:
            return True
        smallest = float(np.abs(self.inverse_scales).min())
        return (
            powers.level > max(powers.evaluator.floor, 1) and self._scale_of_masks(powers) * smallest >= 2**LEAST_BITS
        )

    @staticmethod
    def _scale_of_masks(powers: Ciphertexts) -> float:
        """Return the scale of plaintexts, so that their products with unreduced powers get the usual scale."""
        parameters, limbs = powers.evaluator.ring.parameters, powers.level + 1
        return parameters.scale * math.prod(parameters.primes[limbs - 2 : limbs]) / powers.scale

    def _row_sums(self, x: Ciphertexts) -> Ciphertexts:
        """Return the sums over all places: (heads T,) -> (heads,)."""
        b = self.layout.baby
        return self._add_giants([head[giant : giant + b].total() for head in self._heads(x) for giant in self._giants])

    def _add_giants(self, parts: list[Ciphertexts]) -> Ciphertexts:
        """Add sums over baby steps, which may be unreduced products: (heads times giant steps,) -> (heads,)."""
        together, step, out = concatenate(parts), self.layout.samples, []
        if together.limbs.shape[1] == 3:
            together = relinearise_and_rescale(together)
        for row in self._heads(together):
            total = row[:1]
            for number, giant in enumerate(self._giants[1:], start=1):
                total = total + row[number : number + 1].rotate(giant * step)
            out.append(total)
        return concatenate(out)

    def _attention_weights(self, powers: Ciphertexts, inverses: Ciphertexts) -> Ciphertexts:
        """Return the attention weights: each diagonal times the inverse of its row sums, and zero for copies.

        They are refreshed here, as pairs, before the many rotated copies are made. Both diagonals of a pair are of the
        same baby step, so they have the same mask of copies.
        """
        step, b = self.layout.samples, self.layout.baby
        turned = inverses.rotations([-giant * step for giant in self._giants])
        rows = [g * self.heads + k for k in range(self.heads) for g in range(len(self._giants)) for _ in range(b)]
        weights = product_pairs(powers, turned, rows)
        if self.layout.places != self.layout.tokens:
            if weights.level < max(weights.evaluator.floor, 1):  # no prime is left for the masks
                weights = weights.refresh_pairs()
            weights = weights.for_plain()
            scale = weights.plain_scale()
            weights = weights.evaluator.rescale(times_slots(weights, self._masks(weights, scale), scale))
        return weights.refresh_pairs().unpair(len(powers))

    def _mix_values(self, weights: Ciphertexts, value: Ciphertexts) -> Ciphertexts:
        """Return the sums of the values, which are pairs, weighted by the attention weights: (heads T,) -> (d,)."""
        step, b, out = self.layout.samples, self.layout.baby, []
        for head, values in zip(self._heads(weights), self._heads(value), strict=True):
            moved = values.rotations([i * step for i in range(b)])
            parts = relinearise_and_rescale(outer(head, moved, b, last=False))
            total = parts[: len(values)]
            for number, giant in enumerate(self._giants[1:], start=1):
                total = total + parts[number * len(values) : (number + 1) * len(values)].rotate(giant * step)
            out.append(total.unpair(self.features // self.heads))
        return concatenate(out)


def _times_whole(x: Ciphertexts, factor: int) -> Ciphertexts:
    """Multiply by a power of two, as a product of small factors that cost no level."""
    while factor > 1:
        x, factor = x * min(factor, 16), factor // 16
    return x
