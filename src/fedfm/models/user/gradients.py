"""Find the trained tensors of a user's module that get a gradient, from the graph of a trial, without training.

The trial runs in evaluation mode, and its graph stores no values, so it takes no more memory than without gradients.
Tensors that its loss does not depend on are checked again in training mode: a part may run only in training mode, and a
part recomputed by a checkpoint is not in the graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedfm.errors import InputError, first_line
from fedfm.models.loss_graph import is_opaque, reach
from fedfm.models.model import Model

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_NAMED = 2  # tensors that a notice names
_READING = frozenset(  # functions that pass a tensor's values to Python, or to the shape of a tensor
    {
        *("__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy"),
        *("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"),
    }
)


def idle(model: Model, in_trial: set[str], loss: Callable[[], Tensor]) -> tuple[str, ...]:
    """A notice if trained tensors get no gradient.

    Some modules choose for each row among the parts of a list, e.g. among experts. A part that no row of the trial
    chose is not reported.

    Args:
        in_trial: the tensors on which the trial's loss depends.
        loss: computes the loss again on the first rows; called only if the trial did not reach all tensors.

    Raises:
        InputError: no trained tensor gets a gradient.
    """
    live = model.live()
    if len(in_trial) == len(live):
        return ()
    run = _Run(model.module)
    try:
        with _as_in_training(model), run.watch():
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
    names = [name for name in live if name not in found and not run.may_choose(name, found)]
    if not names:
        return ()
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"{len(names)} of {len(live)} trained tensors get no gradient from the first rows, and are sent in "
        f"vain: {', '.join(names[:_NAMED])}{more}",
    )


@contextmanager
def _as_in_training(model: Model) -> Iterator[None]:
    """Context manager: training mode with gradients of None; restores them, buffers, generators and the mode."""
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


@dataclass
class _Run:
    """One forward pass: which modules ran, and which of them read their tensors' values to make a choice."""

    root: nn.Module
    called: set[str] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)
    inside: list[str] = field(default_factory=list)  # modules whose call is active, the innermost last

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Context manager: records the calls."""
        hooks: list[Any] = []
        for path, module in self.root.named_modules():
            hooks += [
                module.register_forward_pre_hook(lambda *_, path=path: self._begin(path)),
                module.register_forward_hook(lambda *_: self._end(), always_call=True),
            ]
        try:
            with _Reads(self._read):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, path: str) -> None:
        self.called.add(path)
        self.inside.append(path)

    def _end(self) -> None:
        if self.inside:
            self.inside.pop()

    def _read(self) -> None:
        if self.inside:
            self.readers.add(self.inside[-1])

    def may_choose(self, name: str, found: set[str]) -> bool:
        """Whether the tensor is in a part that did not run, in a list from which a module chooses by values."""
        steps = name.split(".")
        for i in range(len(steps), 0, -1):
            member, above = ".".join(steps[:i]), ".".join(steps[: i - 1])
            if not isinstance(self.root.get_submodule(above), _LISTS) or member in self.called:
                continue
            owner = next((p for k in range(i - 1, -1, -1) if (p := ".".join(steps[:k])) in self.called), None)
            if owner in self.readers and any(f".{other}".startswith(f".{above}.") for other in found):
                return True
        return False


class _Reads(TorchFunctionMode):
    """Calls ``read`` whenever code reads a tensor's values."""

    def __init__(self, read: Callable[[], None]) -> None:
        super().__init__()
        self._read = read

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _READING or (name == "where" and len(args) == 1) or (name == "__getitem__" and _by_mask(args[1])):
            self._read()
        return function(*args, **(kwargs or {}))


def _by_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)
