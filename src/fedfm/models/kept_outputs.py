"""Modules that keep in evaluation mode what they computed from their weights, such as the attention of LeViT.

They forget it as they are set to training mode, which here most modules never are. So these are trained in training
mode, without the modules inside them, and forget when they get other weights.
"""

from __future__ import annotations

from torch import nn


def keepers(module: nn.Module) -> list[nn.Module]:
    """Modules of transformers that do something of their own as they are set to a mode."""
    own = (m for m in module.modules() if type(m).train is not nn.Module.train)
    return [m for m in own if type(m).__module__.startswith("transformers.")]


def forget(module: nn.Module) -> None:
    """Let a module forget what it keeps; the modes stay as they are."""
    modes = [(m, m.training) for m in module.modules()]
    module.train()
    for m, mode in modes:
        m.training = mode


def begin(module: nn.Module) -> None:
    """Set a module to training mode, which keeps nothing; those inside it keep their modes."""
    forget(module)
    module.training = True
