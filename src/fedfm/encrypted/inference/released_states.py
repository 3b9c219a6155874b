"""Disclosed activations: the values that a key holder may see of a block's output, computed in the clear or encrypted.

They are computed from a block's states (tokens, d), and there are three kinds. ``class`` is the class token, or the
mean over tokens if the model has no class token. ``grid`` is this value, and the means of the four quadrants of a
square grid of patches. ``tokens`` is every token, projected by a secret matrix.

Under encryption, several features share a ciphertext, whose slot t B + s belongs to token t of sample s (of B samples).
Rotations, and products with plaintexts, move a value to the slot of another token. Slots without a disclosed value are
multiplied by zero. For ``grid``, the mean over all tokens is not sent, because it is the mean of the four other means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.token_places import places_of
from fedfm.errors import InputError

Numbers = NDArray[np.floating[Any]]
KINDS = ("class", "grid", "tokens")


@dataclass(frozen=True)
class Released:
    """The disclosed activations of a block.

    Attributes:
        kind: ``class``, ``grid`` or ``tokens``.
        tokens: number of tokens of a sample. A ciphertext has a place for each, and more up to a power of two.
        features: d of the model.
        projection: (p, d), for ``tokens``; otherwise None.
        class_token: whether token 0 is a class token; if so, ``class`` is this token.

    Raises:
        InputError: the tokens do not allow this kind.
    """

    kind: str
    tokens: int
    features: int
    projection: Numbers | None = None
    class_token: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f'released = "{self.kind}": expected one of {", ".join(KINDS)}')
        if self.kind == "grid" and (self.class_token or self.tokens < 4 or math.isqrt(self.tokens) ** 2 != self.tokens):
            first = ", the first a class token" if self.class_token else ""
            raise InputError(
                f'released = "grid" needs a square grid of patches; the model has {self.tokens} tokens{first}'
            )
        if (self.projection is not None) != (self.kind == "tokens"):
            raise InputError('a projection belongs to released = "tokens"')
        if self.projection is not None and self.projection.shape[1] != self.features:
            raise InputError(f"a projection {self.projection.shape} for {self.features} features")

    @classmethod
    def for_receiver(cls, kind: str, tokens: int, width: int) -> Released:
        """Describe the activations as their receiver sees them: projected values count as ordinary features."""
        return cls(kind, tokens, width, np.eye(width) if kind == "tokens" else None)

    @property
    def positions(self) -> int:
        """P, the number of disclosed positions: disclosed activations are (samples, P, width)."""
        return {"class": 1, "grid": 5, "tokens": self.tokens}[self.kind]

    @property
    def places(self) -> int:
        """Number of places for tokens in a ciphertext, a power of two."""
        return places_of(self.tokens)

    @property
    def width(self) -> int:
        """Number of features at one disclosed position."""
        return self.features if self.projection is None else len(self.projection)

    @property
    def together(self) -> int:
        """Number of features in one ciphertext."""
        return {"class": self.tokens, "grid": self.tokens // 4, "tokens": 1}[self.kind]

    @property
    def ciphertexts(self) -> int:
        """Number of ciphertexts for one block and batch."""
        return -(-self.width // self.together)

    def gain(self) -> float:
        """Largest magnitude of a disclosed value if states have magnitudes up to 1."""
        return 1.0 if self.projection is None else float(np.abs(self.projection).sum(axis=1).max())

    def clear(self, states: Numbers) -> NDArray[np.float64]:
        """Compute the activations in the clear, by their definition: (..., T, d) -> (..., P, width)."""
        x = np.asarray(states, np.float64)
        if self.projection is not None:
            return np.asarray(x @ self.projection.T, np.float64)
        first = x[..., :1, :] if self.class_token else x.mean(-2, keepdims=True)
        if self.kind == "class":
            return first
        parts = [x[..., group, :].mean(-2, keepdims=True) for group in self._groups()]
        return np.concatenate([first, *parts], axis=-2)

    def weights(self) -> dict[int, NDArray[np.float64]]:
        """Return factors (together, places) for each rotation j: one factor for each feature and place.

        For each j, the weighted features are added, and their sum is rotated by j tokens. The ciphertext is the sum of
        the results over j.
        """
        out: dict[int, NDArray[np.float64]] = {}
        for group, slots in zip(self._groups(), self._targets(), strict=True):
            for feature, slot in enumerate(slots):
                for token in group:
                    j = (token - slot) % self.places
                    out.setdefault(j, np.zeros((self.together, self.places)))[feature, token] = 1 / len(group)
        return out

    def from_slots(self, slots: NDArray[np.float64], samples: int) -> NDArray[np.float64]:
        """Arrange slots (ciphertexts, N / 2) as states (samples, P, width)."""
        x = slots.reshape(len(slots), self.places, -1)[:, : self.tokens, :samples]
        if self.kind == "tokens":
            return np.ascontiguousarray(x.transpose(2, 1, 0))
        parts = [x[:, targets].reshape(-1, samples)[: self.width] for targets in self._targets()]
        if self.kind == "grid":
            parts = [np.mean(parts, axis=0), *parts]
        return np.ascontiguousarray(np.stack(parts).transpose(2, 0, 1))

    def _groups(self) -> list[list[int]]:
        """Return one list of tokens for each mean that is sent: the mean is computed over these tokens."""
        if self.kind == "class":
            return [[0]] if self.class_token else [list(range(self.tokens))]
        side = math.isqrt(self.tokens)
        half = side // 2
        corners = [(r, c) for r in (0, half) for c in (0, half)]
        return [[(r + i) * side + c + k for i in range(half) for k in range(half)] for r, c in corners]

    def _targets(self) -> list[list[int]]:
        """For each mean that is sent, return one token per feature: the slots of this token receive the mean."""
        return [list(range(self.tokens))] if self.kind == "class" else self._groups()
