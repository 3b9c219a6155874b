"""Intervals measured again on a trained twin, where its arguments have left those of the tamed model.

The penalties of a distillation are means, which do not hold rare arguments back. One argument outside the interval of
1 / x or 1 / sqrt(x) can give numbers that drive all later ones out. So the blocks are taken in turn, and in each its
arguments in the order of their computation: each is measured on inputs that are known to be good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch
from fedfm.encrypted.student import conversion, fit_polynomials
from fedfm.encrypted.student.distillation_loss import Taps
from fedfm.encrypted.student.fit_polynomials import Measured, refit
from fedfm.encrypted.student.modules import Functions
from fedfm.errors import InputError

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named arguments of a block
_PRE_NORM = ("first", "scores", "sums", "second", "hidden")  # the order of a block's arguments
_POST_NORM = ("scores", "sums", "first", "hidden", "second")
_MOST = 1 << 30  # bytes of states before a block that are held
_UNCHANGED = ("scores", "hidden")  # their polynomials stay as they are


@torch.no_grad()
def widen(
    taps: Taps,
    entries: list[dict[str, Any]],
    kind: str,
    batches: Callable[[], Iterable[Batch]],
    *,
    keep: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure a twin's arguments without clamps and renew the polynomials that have no room for them.

    Args:
        taps: the twin, with the polynomials of ``entries``; it gets the new ones.
        kind: of the polynomials, as in :data:`fit_polynomials.KINDS`.
        batches: the rows, or so many of the first ones that their states before a block take a gigabyte.
        keep: intervals only grow, and as far as they can, as in :func:`fit_polynomials.refit`.
        tick: called after each block.

    Returns:
        The entries of all blocks.

    Raises:
        InputError: the arguments of a block spread too far.
    """
    blocks = [block for _, block in taps.model.parts.blocks]
    order = _PRE_NORM if conversion.pre_norm(taps.model.module) else _POST_NORM
    found = []
    with taps.model.evaluating():
        calls = _calls(taps, blocks[0], batches())
        for i, (block, functions, entry) in enumerate(zip(blocks, taps.functions, entries, strict=True), 1):
            left: tuple[str, ...] = order
            while True:
                measured, states = _pass(taps, block, functions, calls)
                try:
                    entry, left = _refit_next(entry, measured, kind, left, keep)
                except ValueError as error:
                    raise InputError(f"block {i}, measured again: {error}; train longer") from None
                fit_polynomials.apply(functions, entry)
                if not left:
                    break
            found.append(entry)
            calls = [((x, *args[1:]), kwargs) for x, (args, kwargs) in zip(states, calls, strict=True)]
            tick()
    for module in taps.modules():
        module.forget()
    return found


def _refit_next(
    entry: dict[str, Any], measured: Measured, kind: str, names: tuple[str, ...], keep: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The entry with the first polynomial renewed that changes what follows, and the names that follow."""
    for k, name in enumerate(names, 1):
        new = refit(entry, measured, kind, name, keep=keep)
        if new is not None:
            entry = new
            if name not in _UNCHANGED:
                return entry, names[k:]
    return entry, ()


def _pass(taps: Taps, block: nn.Module, functions: Functions, calls: list[Call]) -> tuple[Measured, list[Tensor]]:
    """One block on all batches: its arguments, and its outputs."""
    measured, states = Measured(), []
    with taps.recording():
        for args, kwargs in calls:
            y = block(*args, **kwargs)
            states.append(y[0] if isinstance(y, tuple) else y)
            taps.states.clear()  # the block's hook keeps them too
            measured.add(functions)
    return measured, states


def _calls(taps: Taps, first: nn.Module, batches: Iterable[Batch]) -> list[Call]:
    """What the first block gets for each batch, as long as there is room."""
    calls: list[Call] = []
    held = 0
    hook = first.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    try:
        for batch in batches:
            taps(batch)
            held += calls[-1][0][0].nbytes
            if held > _MOST:
                break
    finally:
        hook.remove()
    return calls
