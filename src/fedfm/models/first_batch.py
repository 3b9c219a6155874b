"""A check of the model on two rows before the first round: whether the model computes what its settings assume.

A head that is trained alone must compute its logits from one vector per row. A language model must not see the words
that it predicts. The blocks must run in their order. Every trained tensor must get a gradient. The check changes no
statistics, no random generators and no gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.models.loss_graph import is_opaque, reach
from fedfm.models.model import Model

_NAMED = 2  # number of tensors that a notice names


def look(model: Model, rows: Rows) -> list[str]:
    """Notices about the model: trained tensors without a gradient; rows of a batch that affect each other.

    Args:
        rows: a few training rows, from :meth:`Model.prepare`. The two shortest are computed; for a language model
            also the longest.

    Raises:
        InputError: the model has no features before its head although they are needed; it sees the words that it
            predicts; or its trained last blocks are not the last blocks that run.
    """
    if model.hollow or not len(rows) or "features" in rows.tensors:
        return []
    if model.is_language_model:
        from fedfm.models import later_words

        with torch.random.fork_rng(devices=_cuda(model)):
            later_words.refuse(model, rows)
    rows = _shortest(rows)
    with torch.random.fork_rng(devices=_cuda(model)):
        if model.adaptation == "head":
            if model.head is not None:
                from fedfm.models import pooling

                model.pool = pooling.way_of(model, model.head, rows)
            return []
        live = model.live()
        with _calls(model) as called, _at_rest(model), torch.enable_grad():
            loss = model.loss(model.encode(rows).batch(range(len(rows))))
            found = _with_gradient(loss, live)
        notices: list[str] = []
        if model.tools.tokenizer is not None and model.task.classifies_by_head:
            from fedfm.models import pooling

            notices = pooling.of_padding(model)
    idle = _idle(model, list(live), found)
    _check_order(model, called, idle)
    if not idle:
        return notices
    return [*notices, notice_of_idle(idle, len(live))]


def notice_of_idle(names: Sequence[str], trained: int) -> str:
    """The notice about trained tensors without a gradient; ``trained`` is the number of all trained tensors."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"{len(names)} of {trained} trained tensors get no gradient, and do not change: "
        f"{', '.join(names[:_NAMED])}{more}"
    )


def _with_gradient(loss: Tensor, live: Mapping[str, Tensor]) -> set[str]:
    """Names of the tensors that get a gradient; a backward pass runs only if the graph does not show these tensors.

    A backward pass starts torch's threads. After that a machine with a GPU cannot fork workers for a CPU model.
    """
    if not is_opaque(loss):
        return reach(loss, live)
    found = torch.autograd.grad(loss, list(live.values()), allow_unused=True)
    return {name for name, gradient in zip(live, found, strict=True) if gradient is not None}


def _shortest(rows: Rows) -> Rows:
    """The two shortest rows, or the only one."""
    lengths = [0] * len(rows) if rows.tokens is None else rows.tokens.length.tolist()
    return rows.take(sorted(range(len(rows)), key=lengths.__getitem__)[:2])


def _cuda(model: Model) -> list[torch.device]:
    return [model.device] if model.device.type == "cuda" else []


@contextmanager
def _at_rest(model: Model) -> Iterator[None]:
    """Context manager: evaluation mode, without random draws or changes of statistics; restores the former modes."""
    modes = [(m, m.training) for m in model.module.modules()]
    model.module.eval()
    model.forget()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode


@contextmanager
def _calls(model: Model) -> Iterator[list[str]]:
    """Context manager: records the paths of the blocks' modules in the order of their calls."""
    called = list[str]()
    hooks = [
        block.register_forward_pre_hook(lambda _, __, path=path: called.append(path))
        for stages in model.parts.stages
        for places in stages
        for path, block in places
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def _idle(model: Model, names: Sequence[str], moved: set[str]) -> list[str]:
    """Names of the tensors without a gradient, apart from experts' tensors, since a batch uses only some experts."""
    blocks = [path for stages in model.parts.stages for places in stages for path, _ in places]
    blocks += [path for path, _ in model.parts.vision_blocks]

    def place(name: str) -> tuple[str, str]:
        block = next((path for path in blocks if f".{path}." in f".{name}"), "")
        return block, re.sub(r"\.\d+\.", ".#.", name.partition(block)[2] if block else name)

    used = {place(name) for name in moved}
    return [name for name in names if name not in moved and place(name) not in used]


def _check_order(model: Model, called: Sequence[str], idle: Sequence[str]) -> None:
    """Refuse to train the last blocks if others run after them, or if the loss does not depend on one of them."""
    adapt = model.adaptation_spec
    if adapt.name != "top_layers" and adapt.layers is None:
        return
    count = adapt.layers or 1
    for stages in model.parts.stages:
        number = {path: i for i, places in enumerate(stages) for path, _ in places}
        order = [number[path] for path in dict.fromkeys(called) if path in number]
        last = [path for places in stages[-count:] for path, _ in places]
        dead = next((p for p in last if _holds(model.module, p) and not _moves(model, p, idle)), "")
        if dead:
            raise InputError(f"model.adaptation.layers: no gradient reaches block {dead}: use lora, head or full")
        if order != sorted(order):
            raise InputError(
                f"model.adaptation.layers: the blocks of {model.spec.name!r} run in another order than they are listed "
                "in the model, so that the last ones are unknown: use lora, head or full"
            )


def _holds(module: nn.Module, path: str) -> bool:
    return any(f".{path}." in f".{name}" and p.requires_grad for name, p in module.named_parameters())


def _moves(model: Model, path: str, idle: Sequence[str]) -> bool:
    """Whether a gradient reaches a tensor of this block."""
    return any(f".{path}." in f".{name}" and name not in idle for name in model.live())
