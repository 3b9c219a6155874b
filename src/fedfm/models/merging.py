"""Merges LoRA into the base's weights, if the layers then still compute the same.

A layer with an adapter is merged in float32. A weight of 16 bits has no room for a small change: at a learning rate of
5e-4, rounding the sum to bfloat16 lost nine tenths of what an adapter had learned.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedfm.errors import InputError
from fedfm.models.heads import within

NARROW = (torch.bfloat16, torch.float16)
_ROWS = 2  # number of rows of a probe
_ALIKE = 0.01  # largest accepted difference, as a share of the largest output; the rounding of bfloat16 is smaller


def merge(module: Any) -> Any:
    """The module of a PeftModel with its adapters merged into its weights. The PeftModel must not be used afterwards.

    The merged layers have weights of float32, the others keep their dtype: see :func:`save`.

    If embeddings and head share a weight and LoRA adapts one of them, the head gets a weight of its own.

    Raises:
        InputError: the adapter changes no weights; a layer does not compute with its raw weight (e.g. a convolution
            standardises it), so that merged weights would give other outputs; or modules share an adapted weight.
    """
    if not hasattr(module, "merge_and_unload"):
        kind = next(iter(module.peft_config.values())).peft_type.value
        raise InputError(f"--to hf: an adapter of type {kind} is part of no weight, so it cannot be merged: use peft")
    module = module.eval()
    if (ends := tied_ends(module)) is not None:
        ends[1].weight = nn.Parameter(ends[1].weight.detach().clone(), requires_grad=False)
    refuse_shared(module)
    for name, layer in layers(module):
        merge_layer(name, layer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All adapters are already merged")  # the loop has merged them
        return module.merge_and_unload()


def merge_layer(name: str, layer: Any) -> None:
    """Merge the adapter of one layer into its weights, which become float32; layers without a probe are left to PEFT.

    Raises:
        InputError: as :func:`merge`.
    """
    for weight in layer.get_base_layer().parameters():
        if weight.dtype in NARROW:
            weight.data = weight.data.float()
    probe = _probe(layer.get_base_layer())
    if probe is None:
        return
    with torch.no_grad():
        apart = layer(probe)
        layer.merge()
        gap = (layer(probe) - apart).abs().max()
    if not gap <= _ALIKE * apart.abs().max():
        kind = type(layer.get_base_layer()).__name__
        raise InputError(
            f"--to hf and torch: LoRA cannot be merged into {name}, since a {kind} does not compute with its "
            "raw weights: use peft"
        )


def save(module: Any, folder: Path | str) -> None:
    """Write a module from :func:`merge`; ``config.json`` names float32, so that loading does not round weights."""
    module.save_pretrained(str(folder))
    path = Path(folder) / "config.json"
    if any(p.dtype == torch.float32 for p in module.parameters()) and getattr(module, "dtype", None) != torch.float32:
        config = json.loads(path.read_text(encoding="utf-8")) | {"dtype": "float32"}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tied_ends(module: Any) -> tuple[Any, Any] | None:
    """Embeddings and head, without adapters, if they share a weight and LoRA adapts either; the head loses the tie."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    whole = module.get_base_model() if hasattr(module, "peft_config") else module
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    if head is None:
        return None
    ends = whole.get_input_embeddings(), head
    first, last = (getattr(end, "base_layer", end) for end in ends)
    if first.weight is not last.weight or not any(isinstance(end, BaseTunerLayer) for end in ends):
        return None
    whole.config.tie_word_embeddings = False
    return first, last


def refuse_shared(module: nn.Module) -> None:
    """Refuse an adapted weight that another module has, too: merged into it, the adapter would change both modules.

    Examples are the embeddings of an encoder and of its decoder, and blocks that PEFT's ``layer_replication`` repeats.

    Raises:
        InputError: there is such a weight.
    """
    owners: dict[int, list[str]] = {}
    for name, part in module.named_modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name.removeprefix("base_model.model."))
    for name, layer in layers(module):
        for parameter in layer.get_base_layer().parameters():
            if others := [of for of in owners[id(parameter)] if not within(of, name)]:
                raise InputError(
                    f"--to hf and torch: LoRA adapts {name}, and {others[0].removesuffix('.base_layer')} has the same "
                    "weight: merged into it, the adapter would change both: use peft"
                )


def layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, layer) of each layer with an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in module.named_modules():
        if isinstance(layer, BaseTunerLayer) and hasattr(layer, "merge"):
            yield name.removeprefix("base_model.model."), layer


def _probe(layer: Any) -> Tensor | None:
    """Inputs of a layer, drawn with a fixed seed; None for an unknown kind of layer."""
    weight: Any = getattr(layer, "weight", None)
    generator = torch.Generator().manual_seed(0)
    if isinstance(layer, nn.Linear):
        shape: tuple[int, ...] = (_ROWS, layer.in_features)
    elif isinstance(layer, _ConvNd):
        sides = zip(layer.kernel_size, layer.dilation, layer.stride, strict=True)
        shape = (_ROWS, layer.in_channels, *(d * (k - 1) + 1 + s for k, d, s in sides))
    else:
        return None
    return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)
