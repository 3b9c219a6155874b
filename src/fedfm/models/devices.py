"""Devices: where a model is, how clients share several GPUs, and which facts of a device affect a result's bits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fedfm.errors import InputError

MAP = "auto-map"  # accelerate spreads the layers over all GPUs of this machine
VISIBLE = "CUDA_VISIBLE_DEVICES"
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS sums in a fixed order only with a fixed workspace


def pick(name: str) -> torch.device:
    """The device that ``model.device`` names; if it names several, the first one.

    Raises:
        InputError: the device is not available here.
    """
    if name in ("auto", MAP):
        mps = torch.backends.mps.is_available() and name != MAP
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise InputError(f"model.device: {name!r} is not available here, expected auto, cpu, cuda or mps") from None
    return device


def placement(name: str) -> dict[str, Any]:
    """Arguments of transformers' ``from_pretrained``: none unless a model goes to several devices."""
    return {"device_map": "auto"} if name == MAP and torch.cuda.is_available() else {}


def opens(name: str) -> bool:
    """Whether a model with this ``model.device`` opens an accelerator, after which a process must not fork.

    This function itself opens none. An unavailable device counts as an accelerator; the later load reports it.
    """
    if name in ("auto", MAP):
        return torch.cuda.is_available() or (name == "auto" and torch.backends.mps.is_available())
    return torch.device(name).type != "cpu"


def about(device: torch.device) -> dict[str, Any]:
    """For the manifest: the facts of this device that affect the bits of a result."""
    name = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "type": device.type,
        "name": name,
        "tf32": device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32",
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def make_deterministic() -> None:
    """From now on this process computes with deterministic algorithms; an operation without one raises an error."""
    os.environ.setdefault(_CUBLAS, ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@contextmanager
def restore_determinism() -> Iterator[None]:
    """Context manager: undo :func:`make_deterministic` at the end, for the program that called a run."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        if torch.are_deterministic_algorithms_enabled() != before[0]:  # this call imports torch's compiler, so avoid it
            torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def visible(environment: Mapping[str, str], count: int) -> list[str]:
    """Names of this machine's GPUs in the form for :data:`VISIBLE`.

    Args:
        count: the number that torch sees.

    Example:
        >>> visible({"CUDA_VISIBLE_DEVICES": "4,6"}, 2), visible({}, 2)
        (['4', '6'], ['0', '1'])
    """
    listed = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    return listed[:count] if listed else [str(i) for i in range(count)]


def visible_to_processes(gpus: list[str], each: float) -> list[str]:
    """The GPUs visible to each process, if each process takes ``each`` of a GPU, or several complete ones.

    Raises:
        InputError: a process takes more than there are.

    Example:
        >>> dealt(["0", "1"], 0.5), dealt(["0", "1", "2", "3"], 2)
        (['0', '0', '1', '1'], ['0,1', '2,3'])
    """
    if each > len(gpus):
        raise InputError(f"run.gpus_per_client = {each:g}: this machine has {len(gpus)}; expected at most that")
    if each < 1:
        return [gpu for gpu in gpus for _ in range(int(1 / each + 1e-9))]
    whole = int(each)
    return [",".join(gpus[i : i + whole]) for i in range(0, len(gpus) - whole + 1, whole)]


def gather_trained(module: nn.Module, device: torch.device) -> None:
    """Put the trained parameters onto one device, where an optimiser has them as one vector. Hooks move the inputs of
    these modules to that device, and their outputs back.
    """
    from accelerate.hooks import remove_hook_from_module

    for part in list(module.modules()):
        own = {n: p for n, p in part.named_parameters(recurse=False) if p.requires_grad}
        home = next((p.device for p in own.values()), device)
        if home == device:
            continue
        if hasattr(part, "_hf_hook"):  # a copied head keeps accelerate's hook, which moves inputs to the old device
            remove_hook_from_module(part)
        for name, p in own.items():
            setattr(part, name, nn.Parameter(p.detach().to(device)))
        part.register_forward_pre_hook(lambda _, args: tuple(_move(x, device) for x in args))
        part.register_forward_hook(lambda _, args, y, home=home: _move(y, home))


def _move(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, torch.Tensor) else x
