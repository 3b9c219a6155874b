"""Refuses parameters of a user's module that no federation can train, before any computation."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedfm.errors import InputError


def check_module(module: nn.Module) -> None:
    """Refuse parameters without a shape, with complex values, or with NaN or infinity.

    Raises:
        InputError: there is such a parameter; the error names the first.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                f"model: {name} has no shape yet, as in a lazy module: call the module once on a batch before it is "
                "federated, so that the server and all clients have the same tensors"
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise InputError(
                f"model: {name} is {str(parameter.dtype).removeprefix('torch.')}, and updates are sums of real "
                "numbers: train its real and imaginary parts as two tensors, see torch.view_as_real"
            )
        if parameter.is_floating_point() and parameter.element_size() > 1 and not bool(torch.isfinite(parameter).all()):
            raise InputError(f"model: {name} has NaN or infinity before any training: load undamaged weights")
