"""Modules that cache values computed from their weights in evaluation mode, such as the attention of LeViT.

Such a module clears its cache when it is set to training mode. But fedfm keeps most modules in evaluation mode, also
while it trains them. So for training it sets only these modules to training mode, not the modules inside them. It also
clears their caches when they get other weights.
"""

from __future__ import annotations

from torch import nn


def keepers(module: nn.Module) -> list[nn.Module]:
    """Modules whose own class, in an architecture of transformers, overrides ``train()``: it does more than set a mode.

    The base class of all models of transformers overrides it, too, and keeps nothing. Such a model must stay in
    evaluation mode: in training mode a BART drops out its embeddings, an OPT its layers, and a Whisper masks features.
    """
    return [m for m in module.modules() if type(m).train.__module__.startswith("transformers.models.")]


def forget(module: nn.Module) -> None:
    """Clear a module's cache; its modes stay unchanged."""
    modes = [(m, m.training) for m in module.modules()]
    module.train()
    for m, mode in modes:
        m.training = mode


def begin(module: nn.Module) -> None:
    """Set a module to training mode, in which it caches nothing; the modules inside it keep their modes."""
    forget(module)
    module.training = True
