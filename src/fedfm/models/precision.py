"""Half precision: frozen weights are 16-bit, trained weights are float32, and the forward pass runs under autocast.

Mixed Precision Training. Micikevicius et al. ICLR 2018. A small step vanishes in a half-precision weight (bfloat16 has
8 significant bits). So the weights that an optimiser changes are float32, and every forward pass rounds a copy of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fedfm.errors import InputError
from fedfm.models.locate import DTYPES
from fedfm.models.spec import ModelSpec

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)


def train_in_single(module: nn.Module) -> None:
    """Make trained tensors float32, and also norms with their statistics; other frozen parts keep their dtype.

    Norms have few values, and a half-precision norm refuses the float32 output of a trained layer below it.
    """
    for part in module.modules():
        own = dict(part.named_parameters(recurse=False))
        if isinstance(part, NORMS) or any(p.requires_grad for p in own.values()):
            for p in own.values():
                # A placeholder, one number as large as a matrix, stays one.
                whole = any(p.stride()) or not p.dim()
                p.data = p.data.float() if whole else p.data.as_strided((), ()).float().expand(p.shape)
            for name, buffer in part.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(part, name, buffer.float())


@contextmanager
def reduced_precision(dtype: str, device: torch.device) -> Iterator[None]:
    """Context manager of a forward pass: products use this dtype; float32 changes nothing."""
    if dtype == "float32":
        yield
        return
    with torch.autocast(device.type, dtype=DTYPES[dtype]):
        yield


def check_trainable(spec: ModelSpec) -> None:
    """Refuse to train through a float16 network.

    Raises:
        InputError: gradients would underflow: the smallest float16 is 6e-8, and losses are not scaled here.
    """
    if spec.dtype == "float16" and spec.adaptation and spec.adaptation.name not in ("head", "side_adapter"):
        raise InputError(
            f'model.dtype: with adaptation "{spec.adaptation.name}", gradients pass through the network, and gradients '
            'in float16 vanish below 6e-8: expected "bfloat16" or "float32"'
        )
