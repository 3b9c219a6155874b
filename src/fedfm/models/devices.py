"""Picks a model's device, lists properties of a device that affect a result's bits, sets deterministic algorithms."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedfm.errors import InputError

MAP = "auto-map"  # accelerate spreads the layers over all GPUs of this machine
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
    """Arguments for transformers' ``from_pretrained`` that spread the layers over several GPUs; {} for one device."""
    return {"device_map": "auto"} if name == MAP and torch.cuda.is_available() else {}


def about(device: torch.device) -> dict[str, Any]:
    """The properties of this device that affect the bits of a result, for the manifest."""
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
    """Make this process use deterministic algorithms; an operation without such an algorithm then raises an error."""
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
        if (
            torch.are_deterministic_algorithms_enabled() != before[0]
        ):  # avoid the next call: it imports torch's compiler
            torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
