"""Finds the pretrained models inside a transformers model, and the linear map to its outputs.

Both are found by transformers' attributes, not by the order of modules: a pretrained model has a
``base_model_prefix``, a language model names its output embeddings, and a classifier has ``num_labels`` outputs,
computed outside the pretrained part.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def bases(module: nn.Module) -> tuple[str, ...]:
    """Paths of the pretrained models in ``module``; ("",) if the module itself is one."""
    inside = (name for name, m in module.named_children() if hasattr(m, "base_model_prefix"))
    return tuple(inside) or ("",)


def labels_pixels(module: nn.Module) -> bool:
    """Whether the module is one of transformers' classes for semantic segmentation."""
    return type(module).__name__.endswith("ForSemanticSegmentation")


def within(path: str, outer: str) -> bool:
    """Whether the module or tensor of this path is the module ``outer`` or inside it."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def output_maps(module: nn.Module) -> list[str]:
    """Paths of the linear maps with one output per label, outside the pretrained part."""
    count = getattr(getattr(module, "config", None), "num_labels", None)
    inside = [b for b in bases(module) if b]
    return [
        path
        for path, m in module.named_modules()
        if isinstance(m, nn.Linear) and m.out_features == count and not any(within(path, b) for b in inside)
    ]


def head_of(module: Any) -> str:
    """Path of a transformers model's last linear map, or of its decoder of pixels; "" if the model has neither."""
    if labels_pixels(module):
        from fedfm.models.pixel_heads import pixel_head

        return pixel_head(module)
    if (out := module.get_output_embeddings()) is not None:
        return next((path for path, m in module.named_modules() if m is out and isinstance(m, nn.Linear)), "")
    return next(reversed(output_maps(module)), "")
