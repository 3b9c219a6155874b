"""torch.compile of a model's blocks, one by one: blocks of the same shape share the compiled code.

Fused operations round differently: results agree with uncompiled ones up to rounding, not bit by bit. A method may
use a hook to shift a block's weights. A compiled block notices a new hook only if torch's option
``skip_nnmodule_hook_guards`` is off.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfm.errors import InputError, first_line
from fedfm.models.spec import ModelSpec

if TYPE_CHECKING:
    from fedfm.models.families import Parts


def check(spec: ModelSpec, parts: Parts) -> None:
    """Refuse compilation if it would do nothing, or conflict with another change of the blocks.

    Raises:
        InputError: the blocks are unknown, or gradient checkpointing computes them twice.
    """
    if not any(parts.encoders):
        raise InputError("model.compile: the blocks of this architecture are unknown; drop it")
    if spec.gradient_checkpointing:
        raise InputError(
            "model.compile: compiled blocks keep their own activations; drop this key or model.gradient_checkpointing"
        )


def compile_blocks(parts: Parts, mode: str, device: torch.device) -> str:
    """Let the blocks compile at their first call; returns the reason if they cannot, else ""."""
    if reason := _missing(device):
        return (
            f'model.compile = "{mode}": there is no compiler for {device.type} here ({reason}); the model runs as it is'
        )
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # during tracing
    for blocks in parts.encoders:
        for _, block in blocks:
            block.compile(mode=None if mode == "default" else mode)
    return ""


@cache
def _missing(device: torch.device) -> str:
    """Why this device's compiler does not work; "" if it works. The test compiles a small function."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of processes would not survive a fork

    def one_more(x: Tensor) -> Tensor:
        return torch.relu(x + 1)

    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(None):
            warnings.simplefilter("ignore")
            torch.compile(one_more)(torch.ones(8, device=device))
    except Exception as error:  # a missing C++ compiler, Python header or Triton raises its own error class
        torch._dynamo.reset()
        return first_line(error)
    return ""
