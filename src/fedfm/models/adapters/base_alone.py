"""Compute with the base of a model that LoRA adapts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


@contextmanager
def base_alone(module: nn.Module) -> Iterator[None]:
    """Context manager: a module with LoRA computes the same as its base.

    Forward hooks of the adapted layers are off, too, because they add other adapters or a shift. Afterwards the trained
    tensors, the active adapters and the hooks are as before.
    """
    layers: list[Any] = [m for m in module.modules() if isinstance(m, BaseTunerLayer)]
    on = [layer for layer in layers if not layer.disable_adapters]
    flags = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    hooks = [layer._forward_hooks for layer in layers]
    for layer in on:
        layer.enable_adapters(False)
    for layer in layers:
        layer._forward_hooks = type(layer._forward_hooks)()
    try:
        yield
    finally:
        for layer, own in zip(layers, hooks, strict=True):
            layer._forward_hooks = own
        for layer in on:
            layer.enable_adapters(True)
        for p, flag in flags:  # PEFT changes these flags when it turns adapters on and off
            p.requires_grad_(flag)
