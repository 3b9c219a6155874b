"""Where a model of transformers ends: the pretrained models inside it, and the map to its outputs.

By what transformers says, not by the order of modules: a pretrained model has a ``base_model_prefix``, a language model
names its output embeddings, and a classifier's outputs are ``num_labels`` numbers, computed outside of what was
pretrained.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def bases(module: nn.Module) -> tuple[str, ...]:
    """Paths of the pretrained models in ``module``; ("",) if it is one itself."""
    inside = (name for name, m in module.named_children() if hasattr(m, "base_model_prefix"))
    return tuple(inside) or ("",)


def within(path: str, outer: str) -> bool:
    """Whether the module or tensor of this path is, or lies in, the module ``outer``."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def output_maps(module: nn.Module) -> list[str]:
    """Paths of the linear maps to as many outputs as the model has labels, outside of what was pretrained."""
    count = getattr(getattr(module, "config", None), "num_labels", None)
    inside = [b for b in bases(module) if b]
    return [
        path
        for path, m in module.named_modules()
        if isinstance(m, nn.Linear) and m.out_features == count and not any(within(path, b) for b in inside)
    ]


def head_of(module: Any) -> str:
    """Path of the last linear map of a model of transformers; "" if it has none."""
    if (out := module.get_output_embeddings()) is not None:
        return next((path for path, m in module.named_modules() if m is out and isinstance(m, nn.Linear)), "")
    return next(reversed(output_maps(module)), "")
