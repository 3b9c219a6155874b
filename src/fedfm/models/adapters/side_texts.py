"""Side adapters next to a student of texts, a BERT whose rows have a fixed number of places.

Each row of n tokens has T places; those behind its tokens hold copies of them, as ``fedfm distil`` has arranged. The
disclosed activations are those of the normalised states, before a norm's scale and shift, as an encrypted computation
has them: their mean over the T places, or each place through a projection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.models import families
from fedfm.models.adapters import side_adapter
from fedfm.models.adapters.side_adapter import Release, SideAdapter, SideModel
from fedfm.models.families import Parts
from fedfm.models.model import Model
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import AdaptationSpec, ModelSpec

PLACES = "fedfm_places"  # key of T in a student's config.json


def text_places(module: Any) -> int:
    """The number T of places of a student's rows; 0 if it is not a student of texts."""
    return int(getattr(getattr(families.unwrap(module), "config", None), PLACES, 0) or 0)


def base_of(module: Any) -> Any:
    """The encoder without its head."""
    inner = families.unwrap(module)
    return getattr(inner, inner.base_model_prefix, inner)


def normalised_states(module: Any, states: Sequence[Tensor]) -> list[Tensor]:
    """The blocks' inputs or outputs (n, T, d) before the scale and the shift of their norms.

    Args:
        states: b_0, the first block's input, and the block outputs b_1 ... b_L.
    """
    base = base_of(module)
    norms = [base.embeddings.LayerNorm, *(block.output.LayerNorm for block in base.encoder.layer)]
    return [(x - n.bias.detach().to(x)) / n.weight.detach().to(x) for x, n in zip(states, norms, strict=True)]


class TextBackbone(Model):
    """The frozen student; its block outputs are normalised states."""

    def blocks(self, rows: Rows) -> list[Tensor]:
        """The normalised states of the embedding and of all blocks, each (n, T, d), on the CPU."""
        with torch.no_grad():
            device = next(self.module.parameters()).device
            states = normalised_states(self.module, [x.to(device) for x in super().blocks(rows)])
        return [x.cpu() for x in states]


def around_texts(
    module: nn.Module,
    spec: ModelSpec,
    parts: Parts,
    *,
    classes: Sequence[str],
    tools: Tools,
    fingerprint: str,
    seed: int,
) -> SideModel:
    """Side adapters next to a student of texts.

    Raises:
        InputError: texts have no such disclosure, or the projection is wider than a token.
    """
    adapt = spec.adaptation or AdaptationSpec("side_adapter")
    config: Any = module.config
    places, width, blocks = text_places(module), int(config.hidden_size), len(parts.blocks)
    if adapt.released == "grid":
        raise InputError('released = "grid": texts have no quadrants; expected "class" or "tokens"')
    projection = side_adapter.disclosed_projection(module, spec, width)
    module.requires_grad_(False)
    backbone = TextBackbone(
        module,
        spec=dataclasses.replace(spec, adaptation=AdaptationSpec("head")),
        task="classification",
        classes=classes,
        parts=parts,
        tools=tools,
        fingerprint=fingerprint,
        head=None,
    )
    of_places = torch.full((1, places), 1 / places) if projection is None else torch.eye(places)
    released = Release(of_places, projection)
    scales, ranges = side_adapter.stored_scales(module, projection)
    shape = blocks, len(released.positions), width if projection is None else projection.shape[1]
    net = SideAdapter(*shape, adapt.rank, len(classes)).draw(seed)
    return SideModel(
        net.to(next(module.parameters()).device),
        spec=spec,
        classes=classes,
        tools=tools,
        fingerprint=fingerprint,
        backbone=backbone,
        released=released,
        scales=scales,
        ranges=ranges,
    )
