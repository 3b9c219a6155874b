"""Finds the trained tensors of a user's module that get a gradient, from the autograd graph of a trial forward pass.

The trial runs in evaluation mode. Its graph stores no values, so it needs no more memory than a pass without gradients.
Tensors on which the trial's loss does not depend are checked again in training mode: a part may run only in training
mode, and a part that gradient checkpointing recomputes is not in the graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fedfm.errors import InputError, first_line
from fedfm.models.loss_graph import is_opaque, reach
from fedfm.models.model import Model

_NAMED = 2  # number of tensors that a notice names


def idle(model: Model, in_trial: set[str], loss: Callable[[], Tensor]) -> tuple[str, ...]:
    """A notice if trained tensors get no gradient.

    Args:
        in_trial: the tensors on which the trial's loss depends.
        loss: computes the loss again on the first rows; called only if the trial did not reach all tensors.

    Raises:
        InputError: no trained tensor gets a gradient.
    """
    live = model.live()
    if len(in_trial) == len(live):
        return ()
    try:
        with in_training(model):
            value = loss()
            found = in_trial | reach(value, live)
            if len(found) < len(live) and is_opaque(value):
                value.backward()  # type: ignore[no-untyped-call]
                found |= {name for name, tensor in live.items() if tensor.grad is not None}
    except Exception as error:  # any error of the user's code; it may occur only with few rows
        why = f"{type(error).__name__}: {first_line(error, 200)}"
        return (f"whether all trained tensors get a gradient is unknown: a trial in training mode fails: {why}",)
    if not found:
        raise InputError(
            "loss: no trained tensor gets a gradient: the loss does not depend on the trained tensors, or is cut off "
            "from them, e.g. by detach() or torch.no_grad()"
        )
    names = [name for name in live if name not in found]
    if not names:
        return ()
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"{len(names)} of {len(live)} trained tensors get no gradient from the first rows, and are sent without any "
        f"change unless other rows use them, as with experts: {', '.join(names[:_NAMED])}{more}",
    )


@contextmanager
def in_training(model: Model) -> Iterator[None]:
    """Context manager: training mode without stored gradients; restores gradients, buffers, generators and mode."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - a user's code may draw from it
    buffers = [(b, b.clone()) for b in model.module.buffers()]
    gradients = [(p, p.grad) for p in model.module.parameters()]
    devices = [model.device] if model.device.type == "cuda" else []
    for p, _ in gradients:
        p.grad = None
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            model.train_mode()
            yield
    finally:
        model.eval_mode()
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for p, gradient in gradients:
            p.grad = gradient
