"""torch.compile of a model's blocks, one after the other: blocks of one shape share what is compiled.

Fused operations round otherwise: results equal those without it within rounding, not in their bits. What hangs on a
block from outside, such as a method's shift of its weights, is a hook, and a compiled block looks at its hooks only if
it is told to.
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
    """Refuse where it would do nothing, or where two changes of a block meet.

    Raises:
        InputError: no blocks are known, or they are computed twice.
    """
    if not any(parts.encoders):
        raise InputError("model.compile: no blocks are known of this architecture; drop it")
    if spec.gradient_checkpointing:
        raise InputError("model.compile: compiled blocks keep what they need; drop it or model.gradient_checkpointing")


def compile_blocks(parts: Parts, mode: str, device: torch.device) -> str:
    """Compile the blocks at their first calls; returns why not, "" if they are."""
    if reason := _missing(device):
        return (
            f'model.compile = "{mode}": there is no compiler for {device.type} here ({reason}); the model runs as it is'
        )
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # as it traces
    for blocks in parts.encoders:
        for _, block in blocks:
            block.compile(mode=None if mode == "default" else mode)
    return ""


@cache
def _missing(device: torch.device) -> str:
    """Why this device's compiler does not work, "" if it does: it compiles one sum."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its pool of processes would not survive a fork

    def one_more(x: Tensor) -> Tensor:
        return torch.relu(x + 1)

    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(None):
            warnings.simplefilter("ignore")
            torch.compile(one_more)(torch.ones(8, device=device))
    except Exception as error:  # no C++ compiler, no headers of Python, no Triton: each has errors of its own
        torch._dynamo.reset()
        return first_line(error)
    return ""
