"""Set new intervals of a student, either after a training stage, or for rows of another kind and without training.

The penalties of a distillation are means, which do not prevent rare large arguments. One argument outside the interval
of 1 / x or 1 / sqrt(x) can drive all later arguments out of their intervals. So blocks are measured one after another,
and the arguments within a block are measured in the order of computation. When an argument is measured, all earlier
arguments are already inside their intervals.

For example, a student that was distilled on photographs gets drawings. The functions' arguments leave the intervals,
and the features are NaN. With some drawings, the student's owner can measure wider intervals. The weights do not
change, so heads that were trained on the student's features stay valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedfm.api.model_folder import ModelFolder, held_out
from fedfm.core.rows import Batch
from fedfm.data.table import Table
from fedfm.encrypted.student import conversion, fit_polynomials
from fedfm.encrypted.student.distil_rows import AT_ONCE, MEASURED
from fedfm.encrypted.student.distil_spec import DistilSpec
from fedfm.encrypted.student.distillation_loss import Taps, save
from fedfm.encrypted.student.fit_polynomials import Measured, refit
from fedfm.encrypted.student.input_limits import ENTRY
from fedfm.encrypted.student.interval_table import table_of
from fedfm.encrypted.student.modules import Functions
from fedfm.encrypted.student.scores import outputs, outside
from fedfm.errors import InputError
from fedfm.linalg.params import sha256_of
from fedfm.models import families
from fedfm.models.model import Model
from fedfm.runtime.progress import EpochProgress

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and named arguments of a block
_PRE_NORM = ("first", "scores", "sums", "second", "hidden")  # the order of a block's arguments
_POST_NORM = ("scores", "sums", "first", "hidden", "second")
_MOST = 1 << 30  # largest size in bytes of the states that are stored before a block
_UNCHANGED = ("scores", "hidden")  # arguments whose polynomials keep their coefficients; only the intervals change
_SIZES = ("scale", "range", "largest")  # keys of a block's entry that are not polynomials


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
    """Measure a student's arguments without clamping, and choose new polynomials where intervals are too narrow.

    Args:
        taps: the student with the polynomials of ``entries``. The function installs the new polynomials in it.
        kind: kind of the polynomials, as in :data:`fit_polynomials.KINDS`.
        batches: the rows. No more rows are used once their states before a block take one gigabyte of memory.
        keep: whether intervals may only grow, as in :func:`fit_polynomials.refit`.
        tick: called after each block.

    Returns:
        The new entries of all blocks, with polynomials and intervals.

    Raises:
        InputError: the arguments of a block spread too far.
    """
    blocks = [block for _, block in taps.model.parts.blocks]
    order = _PRE_NORM if conversion.pre_norm(taps.model.module) else _POST_NORM
    found = []
    with taps.model.evaluating():
        calls = first_inputs(taps, blocks[0], batches())
        for i, (block, functions, entry) in enumerate(zip(blocks, taps.functions, entries, strict=True), 1):
            left: tuple[str, ...] = order
            while True:
                measured, states = run_block(taps, block, functions, calls)
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
    """Fit a block's polynomials again, in the order of computation, until a change affects later arguments.

    Returns:
        The block's entry, and the names of the later arguments, which have to be measured again.
    """
    for k, name in enumerate(names, 1):
        new = refit(entry, measured, kind, name, keep=keep)
        if new is not None:
            entry = new
            if name not in _UNCHANGED:
                return entry, names[k:]
    return entry, ()


def run_block(taps: Taps, block: nn.Module, functions: Functions, calls: list[Call]) -> tuple[Measured, list[Tensor]]:
    """Run one block on all batches; return the extremes of the block's arguments, and its outputs."""
    measured, states = Measured(), []
    with taps.recording():
        for args, kwargs in calls:
            y = block(*args, **kwargs)
            states.append(y[0] if isinstance(y, tuple) else y)
            taps.states.clear()  # the block's hook stores the outputs, too
            measured.add(functions)
    return measured, states


def first_inputs(taps: Taps, first: nn.Module, batches: Iterable[Batch]) -> list[Call]:
    """Return the first block's inputs for each batch, up to the memory limit."""
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


# --- a finished student on other rows---------------------------------------------------------------------------------


def measure_again(
    place: ModelFolder, spec: DistilSpec, table: Table, student: Model, watcher: EpochProgress
) -> dict[str, Any]:
    """Widen a student's intervals where the training rows need this, and write the student into the folder.

    Intervals only grow. The intervals of 1 / x and 1 / sqrt(x) grow at most to the ratio that their polynomials allow.

    Returns:
        ``folder``, ``epochs`` (0), ``parameters``, ``measured`` (rows), ``seconds``, ``params_sha256``, and ``blocks``
        as in a distillation. On held-out rows: ``judged`` (their number), ``accuracy`` (None for a new head),
        ``outside``, and ``without_numbers`` (number of rows whose features overflow). The last three also exist with
        the suffix ``_before``, for the old intervals.

    Raises:
        InputError: the settings request epochs, tokens or views, which need training.
    """
    began = time.perf_counter()
    _check(spec, student)
    index, held = table.rows("train")[:MEASURED], held_out(table)
    config: Any = families.unwrap(student.module).config
    known = getattr(config, conversion.KEY)
    entries = [{k: v for k, v in block.items() if k not in _SIZES} for block in known["blocks"]]

    def batches() -> Iterator[Batch]:
        for start in range(0, len(index), AT_ONCE):
            part = index[start : start + AT_ONCE]
            yield student.prepare(table, part).batch(range(len(part)))

    taps = Taps(student)
    watcher.started(1, 0, len(entries))
    before = _scores_of(taps, table, held)
    entries = widen(taps, entries, known["kind"], batches, keep=True, tick=watcher.step)
    after = _scores_of(taps, table, held)
    shares = [outside([block]) for block in taps.functions]  # fractions on the held-out rows
    new = table_of(taps, entries, known["kind"], batches, after["outside"])
    for block, old in zip(new["blocks"], known["blocks"], strict=True):
        block["scale"] = old["scale"]  # because heads were trained on features divided by this scale
        block |= {name: max(block[name], old[name]) for name in ("range", "largest")}
    new[ENTRY] = wider_limits(known.get(ENTRY, {}), new[ENTRY])
    setattr(config, conversion.KEY, new)
    save(student, place.half(), new_head=bool(student.new))
    result = {
        "folder": str(place.folder),
        "epochs": 0,
        "parameters": sum(p.numel() for p in student.module.parameters()),
        "measured": len(index),
        "judged": len(held),
        **after,
        **{f"{name}_before": value for name, value in before.items()},
        "blocks": [
            {"depth": conversion.depth(block), "outside": share, **entry}
            for block, share, entry in zip(taps.functions, shares, entries, strict=True)
        ],
        "seconds": round(time.perf_counter() - began, 3),
        "params_sha256": sha256_of({"": student.params()}),
    }
    return place.close(result, ("checkpoint", "export"))


def wider_limits(old: dict[str, float], new: dict[str, float]) -> dict[str, float]:
    """Join limits; a student without any stays so, since rows of its first kind are not measured again."""
    return {name: max(limit, new.get(name, limit)) for name, limit in old.items()}


def _check(spec: DistilSpec, student: Model) -> None:
    if any(spec.epochs):
        raise InputError(
            f"model.name: {student.spec.name!r} is a polynomial student already; set distil.epochs = [0, 0, 0] "
            "to measure its intervals again on these rows, without training"
        )
    if spec.image_size is not None or not spec.class_token or spec.views > 1:
        raise InputError(
            "without training, a polynomial student keeps its tokens and reads rows without augmentation; drop "
            "distil.image_size, distil.class_token and distil.views"
        )


def _scores_of(taps: Taps, table: Table, held: np.ndarray) -> dict[str, Any]:
    """Compute metrics on held-out rows."""
    conversion.forget(taps.model.module)
    logits, features, labels = outputs(taps, taps.model.prepare(table, held), len(held))
    finite = torch.isfinite(features).all(1)
    right = finite & (logits.argmax(1) == labels)
    return {
        "accuracy": None if taps.model.new else float(right.double().mean()),
        "outside": outside(taps.functions),
        "without_numbers": int((~finite).sum()),
    }
