"""The parameters without weight decay: biases and norms, by the rule of transformers' ``Trainer``."""

from __future__ import annotations

import re

from torch import nn

# As in transformers.Trainer.get_decay_parameter_names, which decays batch norms, too, if their names do not match.
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


def no_weight_decay(module: nn.Module) -> frozenset[str]:
    """Names of the parameters without decay: all of an ``nn.LayerNorm``, and all whose path matches the rule.

    Example:
        >>> sorted(no_weight_decay(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
        ['0.bias', '1.bias', '1.weight']
    """
    norms = tuple(f"{path}." for path, part in module.named_modules() if path and isinstance(part, nn.LayerNorm))
    names = (name for name, _ in module.named_parameters())
    return frozenset(name for name in names if _NOT_DECAYED.search(name.lower()) or name.startswith(norms))
