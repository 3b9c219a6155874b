"""What no federation can train of a user's module, told by names before anything is computed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedfm.errors import InputError


def check_module(module: nn.Module) -> None:
    """Refuse parameters without a shape, of complex numbers, or with NaN or infinity.

    Raises:
        InputError: with the first of them.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                f"model: {name} has no shape yet, as of a lazy module: call the module once on a batch before it is "
                "federated, so that all parties have the same tensors"
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise InputError(
                f"model: {name} is {str(parameter.dtype).removeprefix('torch.')}, and updates are sums of real "
                "numbers: train its real and imaginary parts as two tensors, see torch.view_as_real"
            )
        if parameter.is_floating_point() and parameter.element_size() > 1 and not bool(torch.isfinite(parameter).all()):
            raise InputError(f"model: {name} has NaN or infinity before any training: load sound weights")
