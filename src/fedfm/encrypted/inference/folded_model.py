"""Interfaces of a model for encrypted inference. The model's affine maps are folded into its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fedfm.encrypted.ckks.transformer_block import EncryptedBlock, Folding, Packing, Powers
from fedfm.encrypted.inference.released_states import Numbers


class FoldedLayer(Protocol):
    """A block of the model: the arguments of :class:`~fedfm.encrypted.ckks.transformer_block.EncryptedBlock`."""

    @property
    def weights(self) -> Mapping[str, Numbers]:
        """The weights and biases by name."""

    @property
    def heads(self) -> int:
        """Number of attention heads."""

    @property
    def norms(self) -> tuple[Folding, Folding]:
        """Polynomials for 1 / sqrt, before the attention and before the MLP."""

    @property
    def exponential(self) -> Powers:
        """The polynomial for exp."""

    @property
    def inverse(self) -> Folding:
        """The polynomial for 1 / x."""

    @property
    def inverse_scales(self) -> Numbers:
        """Factors (heads,) by which row sums are multiplied before ``inverse`` is applied."""

    @property
    def gelu(self) -> Folding:
        """The polynomial for GELU."""

    @property
    def centred_keys(self) -> bool:
        """Whether the mean over the tokens is subtracted from the keys."""


class FoldedModel(Protocol):
    """Embedding, blocks, and the ranges of the blocks' outputs."""

    @property
    def embedding(self) -> Numbers:
        """The weights (d, F) of the embedding."""

    @property
    def bias(self) -> Numbers:
        """The bias (d,) of the embedding."""

    @property
    def positions(self) -> Numbers:
        """The position embeddings (T, d)."""

    @property
    def blocks(self) -> Sequence[FoldedLayer]:
        """The L blocks."""

    @property
    def scales(self) -> Numbers:
        """(L,): a block's disclosed activations are divided by the block's scale."""

    @property
    def ranges(self) -> Numbers:
        """(L,): largest magnitude of each block's states, before they are divided by the scale."""

    @property
    def bound(self) -> float:
        """Largest magnitude of any slot that is refreshed."""

    @property
    def class_token(self) -> bool:
        """Whether token 0 is a class token."""


def block_of(layer: FoldedLayer, layout: Packing) -> EncryptedBlock:
    """Make a block that computes on ciphertexts with this layout."""
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
