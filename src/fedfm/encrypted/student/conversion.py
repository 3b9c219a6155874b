"""Polynomial students: models whose softmax, LayerNorm and GELU are polynomials, for encrypted computation.

A polynomial student is a transformers folder with one more key in ``config.json``: the polynomials and their measured
intervals. :func:`install` puts the polynomials into the loaded module. Without this package, the folder also loads, but
with the exact functions.

Only the functions inside the blocks are replaced. The final norm and the head stay exact, because the side that
computes them has the last states in the clear. LayerNorm subtracts a mean over features. This step can be left out if
the weights before the LayerNorm are centred, so a polynomial student has centred weights (:func:`centre`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fedfm.encrypted.student.fit_polynomials import apply
from fedfm.encrypted.student.folded_blocks import Folded, FoldedBlock
from fedfm.encrypted.student.folding import KEY, MOST_OUTSIDE, PRE_NORM, block_states, fold
from fedfm.encrypted.student.input_limits import read_limits
from fedfm.encrypted.student.modules import (
    ATTENTION,
    Functions,
    PolynomialGelu,
    PolynomialNorm,
    PolynomialSoftmax,
    Replaced,
    register,
)
from fedfm.encrypted.student.text_places import fill_places
from fedfm.encrypted.token_places import places_of
from fedfm.errors import InputError
from fedfm.models import families
from fedfm.models.adapters.side_texts import text_places

VERSION = 1  # version of the table in config.json

__all__ = [
    "KEY",
    "MOST_OUTSIDE",
    "VERSION",
    "Folded",
    "FoldedBlock",
    "block_states",
    "centre",
    "depth",
    "fold",
    "forget",
    "install",
    "is_polynomial_student",
    "pre_norm",
    "prepare",
]


def is_polynomial_student(module: Any) -> bool:
    """Whether the configuration of a transformers module (also inside a PEFT model) is that of a polynomial student."""
    return getattr(getattr(families.unwrap(module), "config", None), KEY, None) is not None


def install(module: nn.Module, config: Any) -> None:
    """Put the polynomials of ``config.json`` into a module with exact functions.

    Raises:
        InputError: the entry in ``config.json`` is damaged, or belongs to another model.
    """
    table = getattr(config, KEY)
    try:
        if table["version"] != VERSION:
            raise ValueError(f"it has version {table['version']}, but this fedfm reads {VERSION}")
        read_limits(table)
        made = prepare(module)
        if len(made) != len(table["blocks"]):
            raise ValueError(f"it has {len(table['blocks'])} blocks, but the model has {len(made)}")
        for block, entry in zip(made, table["blocks"], strict=True):
            apply(block, entry)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"model.name: {KEY} in config.json is not as `fedfm distil` writes it: {error}") from None


def prepare(module: nn.Module) -> tuple[Functions, ...]:
    """Replace the functions of every block by modules, which are exact until they get a polynomial.

    The functions of a polynomial student stay as they are.

    Raises:
        InputError: a block does not have exactly one softmax, two LayerNorms and a GELU.
    """
    inner: Any = families.unwrap(module)
    blocks = families.find(inner, inner.config.model_type).blocks
    if not blocks:
        raise InputError(f"model.name: fedfm does not know the blocks of a model of type {inner.config.model_type!r}")
    register()
    made = tuple(_prepare_block(block, inner.config.model_type) for _, block in blocks)
    if pre_norm(inner):
        embedding: Any = families.find(inner, inner.config.model_type).embedding
        tokens = embedding.position_embeddings.shape[1]
        for functions in made:
            functions.softmax.copies = places_of(tokens) - tokens
    elif text_places(inner):
        fill_places(inner)
        for functions in made:
            functions.softmax.filled = True
    inner.config._attn_implementation = ATTENTION
    return made


def _prepare_block(block: nn.Module, model_type: str) -> Functions:
    if any(isinstance(m, Replaced) for m in block.modules()):
        return Functions.of(block)
    attentions: list[Any] = [m for m in block.modules() if hasattr(m, "is_causal") and hasattr(m, "scaling")]
    places = [(parent, name, m) for parent in block.modules() for name, m in parent.named_children()]
    norms = [(parent, name, m) for parent, name, m in places if isinstance(m, nn.LayerNorm)]
    gelus = [place for place in places if "GELU" in type(place[2]).__name__ and not any(place[2].parameters())]
    causal = any(m.is_causal for m in attentions)
    if len(attentions) != 1 or len(norms) != 2 or len(gelus) != 1 or causal:
        raise InputError(
            f"model.name: a block of type {model_type!r} has {len(attentions)} attentions, {len(norms)} LayerNorms and "
            f"{len(gelus)} GELUs{', and is causal' if causal else ''}; polynomials can replace only one softmax over "
            "all tokens, two LayerNorms and one GELU"
        )
    attentions[0].softmax = PolynomialSoftmax(attentions[0].num_attention_heads)
    for parent, name, norm in norms:
        setattr(parent, name, PolynomialNorm(norm))
    parent, name, exact = gelus[0]
    setattr(parent, name, PolynomialGelu(exact))
    made = Functions.of(block)
    for module in made:
        module.train(block.training)
    return made


# --- weights ----------------------------------------------------------------------------------------------------------
def pre_norm(module: Any) -> bool:
    """Whether the module's blocks have the order of a ViT's: norm, attention, sum, norm, MLP, sum."""
    return families.type_of(families.unwrap(module)) in PRE_NORM


@torch.no_grad()
def centre(module: nn.Module) -> None:
    """Centre the weights of the maps whose outputs add up to the tokens: embedding, attention output, MLP output.

    After this, the mean of these outputs over features is zero.

    LayerNorm subtracts this mean anyway, so the outputs of a pre-norm model do not change. Post-norm models stay as
    they are.
    """
    inner: Any = families.unwrap(module)
    if not pre_norm(inner):
        return
    parts = families.find(inner, inner.config.model_type)
    embedding: Any = parts.embedding
    maps: list[Any] = [embedding.patch_embeddings.projection]
    blocks: list[Any] = [block for _, block in parts.blocks]
    for block in blocks:
        maps += [block.attention.o_proj, block.mlp.fc2]
    for linear in maps:
        for tensor in (linear.weight, linear.bias):
            if tensor is not None:
                tensor.sub_(tensor.mean(0, keepdim=True))
    for name in ("position_embeddings", "cls_token", "distillation_token", "mask_token"):
        token = getattr(embedding, name, None)
        if token is not None:
            token.sub_(token.mean(-1, keepdim=True))


# --- figures ----------------------------------------------------------------------------------------------------------
def forget(module: nn.Module) -> None:
    """Reset the counts of :func:`~fedfm.models.derived_modules.violations`."""
    for m in module.modules():
        if isinstance(m, Replaced):
            m.forget()


def depth(block: Functions) -> int:
    """Return the number of levels that one block takes.

    Levels are needed for two norms (each with its square and its product), the projections to queries, keys and values,
    the scores, exp, the inverse, the two products after it, the MLP's two maps, and its polynomial.

    Raises:
        ValueError: a function is exact.
    """
    s, norms, gelu = block.softmax, [norm.inverse for norm in block.norms], block.gelu.quadratic
    if s.exponential is None or s.inverse is None or None in norms or gelu is None:
        raise ValueError("a block still has exact functions")
    return sum(2 + n.depth for n in norms if n is not None) + 2 + s.exponential.depth + s.inverse.depth + 4 + gelu.depth
