"""GPUs: which of them a process sees, and how a model with layers on several of them is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedfm.errors import InputError
from fedfm.models.devices import MAP

VISIBLE = "CUDA_VISIBLE_DEVICES"


def opens_accelerator(name: str) -> bool:
    """Whether a model with this ``model.device`` opens an accelerator; a process with an open one must not fork.

    The check itself opens no device. An unavailable device counts as an accelerator; loading the model reports it.
    """
    if name in ("auto", MAP):
        return torch.cuda.is_available() or (name == "auto" and torch.backends.mps.is_available())
    return torch.device(name).type != "cpu"


def visible(environment: Mapping[str, str], count: int) -> list[str]:
    """Names of this machine's GPUs, in the form for :data:`VISIBLE`.

    Args:
        environment: the variables of the process's environment.
        count: the number of GPUs that torch sees.

    Example:
        >>> visible({"CUDA_VISIBLE_DEVICES": "4,6"}, 2), visible({}, 2)
        (['4', '6'], ['0', '1'])
    """
    listed = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    return listed[:count] if listed else [str(i) for i in range(count)]


def visible_to_processes(gpus: list[str], each: float) -> list[str]:
    """The value of :data:`VISIBLE` for each of the processes that share these GPUs.

    Args:
        gpus: names of the GPUs.
        each: number of GPUs for each process; below 1 it is a share of one GPU, else a number of complete GPUs.

    Raises:
        InputError: a process takes more GPUs than there are.

    Example:
        >>> visible_to_processes(["0", "1"], 0.5), visible_to_processes(["0", "1", "2", "3"], 2)
        (['0', '0', '1', '1'], ['0,1', '2,3'])
    """
    if each > len(gpus):
        raise InputError(
            f"run.gpus_per_client = {each:g}: this machine has {len(gpus)} GPU{'s' * (len(gpus) != 1)}, "
            "expected at most that many"
        )
    if each < 1:
        return [gpu for gpu in gpus for _ in range(int(1 / each + 1e-9))]
    whole = int(each)
    return [",".join(gpus[i : i + whole]) for i in range(0, len(gpus) - whole + 1, whole)]


def gather_trained(module: nn.Module, device: torch.device) -> None:
    """Move all trained parameters to one device, because the optimiser treats them as one vector.

    One hook moves the inputs of a moved module to this device, another moves its outputs to its former device.
    """
    from accelerate.hooks import remove_hook_from_module

    for part in list(module.modules()):
        own = {n: p for n, p in part.named_parameters(recurse=False) if p.requires_grad}
        home = next((p.device for p in own.values()), device)
        if home == device:
            continue
        if hasattr(part, "_hf_hook"):  # accelerate's hook of a copied head moves inputs to the former device
            remove_hook_from_module(part)
        for name, p in own.items():
            setattr(part, name, nn.Parameter(p.detach().to(device)))
        part.register_forward_pre_hook(lambda _, args: tuple(_move(x, device) for x in args))
        part.register_forward_hook(lambda _, args, y, home=home: _move(y, home))


def _move(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x
