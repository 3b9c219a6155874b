"""What encrypted inference needs of a model: every affine map folded, polynomials with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fedfm.encrypted.ckks.transformer_block import EncryptedBlock, Folding, Packing
from fedfm.encrypted.inference.released_states import Numbers


class FoldedLayer(Protocol):
    """A block: the arguments of :class:`~fedfm.encrypted.ckks.transformer_block.EncryptedBlock`."""

    @property
    def weights(self) -> Mapping[str, Numbers]:
        """By name."""

    @property
    def heads(self) -> int:
        """Of the attention."""

    @property
    def norms(self) -> tuple[Folding, Folding]:
        """1 / sqrt, before the attention and before the MLP."""

    @property
    def exponential(self) -> Folding:
        """In place of exp."""

    @property
    def inverse(self) -> Folding:
        """In place of 1 / x."""

    @property
    def inverse_scales(self) -> Numbers:
        """(heads,)."""

    @property
    def gelu(self) -> Folding:
        """In place of GELU."""

    @property
    def centred_keys(self) -> bool:
        """Whether keys lose their mean over the tokens."""


class FoldedModel(Protocol):
    """Embedding, blocks, and the ranges of what they give."""

    @property
    def embedding(self) -> Numbers:
        """(d, F)."""

    @property
    def bias(self) -> Numbers:
        """(d,)."""

    @property
    def positions(self) -> Numbers:
        """(T, d)."""

    @property
    def blocks(self) -> Sequence[FoldedLayer]:
        """L of them."""

    @property
    def scales(self) -> Numbers:
        """(L,): the states of a block are released over its scale."""

    @property
    def ranges(self) -> Numbers:
        """(L,): largest magnitude of a block's states, before the scale."""

    @property
    def bound(self) -> float:
        """Largest magnitude of any refreshed slot."""

    @property
    def class_token(self) -> bool:
        """Whether token 0 is one."""


def block_of(layer: FoldedLayer, layout: Packing) -> EncryptedBlock:
    """The block on ciphertexts of this layout."""
    return EncryptedBlock(
        layout,
        layer.heads,
        layer.weights,
        layer.norms,
        layer.exponential,
        layer.inverse,
        layer.inverse_scales,
        layer.gelu,
        layer.centred_keys,
    )
