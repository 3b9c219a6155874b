"""Which parameters weight decay spares: biases and norms, by the rule of transformers' ``Trainer``."""

from __future__ import annotations

import re

from torch import nn

# As in transformers.Trainer.get_decay_parameter_names; batch norms of other names are shrunk there, too.
_SPARED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def no_weight_decay(module: nn.Module) -> frozenset[str]:
    """Names of the parameters that keep their size: all of an ``nn.LayerNorm``, and those whose path says so.

    Example:
        >>> sorted(no_weight_decay(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
        ['0.bias', '1.bias', '1.weight']
    """
    norms = tuple(f"{path}." for path, part in module.named_modules() if path and isinstance(part, nn.LayerNorm))
    names = (name for name, _ in module.named_parameters())
    return frozenset(name for name in names if _SPARED.search(name.lower()) or name.startswith(norms))
