"""The table of blocks in a polynomial student's ``config.json``: the polynomials, and the magnitudes of states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fedfm.core.rows import Batch
from fedfm.encrypted.student import conversion, fit_polynomials, folding
from fedfm.encrypted.student.distillation_loss import Distiller, Taps
from fedfm.encrypted.student.input_limits import ENTRY, widen_limits
from fedfm.encrypted.student.text_folding import fold_text_blocks, text_block_states
from fedfm.encrypted.student.text_places import real_places
from fedfm.models.adapters.side_texts import normalised_states, text_places


def finish(distiller: Distiller, batches: Callable[[], Iterable[Batch]], outside: float) -> dict[str, Any]:
    """Centre the student, and write its table into its configuration; see :func:`table_of` for the arguments."""
    model = distiller.student.model
    conversion.centre(model.module)
    table = table_of(distiller.student, distiller.entries, distiller.recipe.polynomials, batches, outside)
    setattr(model.module.config, conversion.KEY, table)
    return table


@torch.no_grad()
def table_of(
    taps: Taps, entries: list[dict[str, Any]], kind: str, batches: Callable[[], Iterable[Batch]], outside: float
) -> dict[str, Any]:
    """Make the table of a polynomial student, with the magnitudes of its states on these rows.

    Args:
        taps: the centred student, with the polynomials of ``entries``.
        kind: kind of the polynomials, as in :data:`fit_polynomials.KINDS`.
        batches: the rows; rows with a state that is not finite are left out.
        outside: fraction of the arguments on held-out rows that are outside their intervals.
    """
    model = taps.model
    blocks = [block for _, block in model.parts.blocks]
    texts = text_places(model.module)
    folds = [folding.fold_block(b) for b in blocks] if conversion.pre_norm(model.module) else None
    folds = list(fold_text_blocks(model.module)) if texts else folds
    n, squares = 0, [0.0] * len(entries)
    highest, largest = [0.0] * len(entries), [0.0] * len(entries)
    inputs: list[Tensor] = []
    limits: dict[str, float] = {}
    hook = blocks[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        with model.evaluating():
            for batch in batches():
                inputs.clear()
                taps(batch)
                states = [inputs[0], *taps.states]
                if texts:
                    states = normalised_states(model.module, states)
                kept = torch.stack([state.isfinite().flatten(1).all(1) for state in states]).all(0)
                if not bool(kept.any()):
                    continue
                states = [state[kept] for state in states]
                if "pixel_values" in batch:
                    widen_limits(limits, batch["pixel_values"][kept])
                n += 1
                for i, (before, state) in enumerate(pairwise(states)):
                    squares[i] += float(state.double().square().mean())
                    highest[i] = max(highest[i], float(state.abs().max()))
                    if folds is not None:
                        x = before.double()
                        if texts:
                            real = real_places(batch["attention_mask"].sum(1).clamp_max(texts), texts)[kept]
                            most = text_block_states(folds[i], x, real)[1]
                        else:
                            most = folding.largest_between(folds[i], x - x.mean(-1, keepdim=True))
                        largest[i] = max(largest[i], most)
    finally:
        hook.remove()
    table: dict[str, Any] = {
        "version": conversion.VERSION,
        "kind": kind,
        "outside": outside,
        ENTRY: limits,
        "blocks": [],
    }
    for entry, square, high, most in zip(entries, squares, highest, largest, strict=True):
        sizes = {"scale": (square / max(n, 1)) ** 0.5, "range": high * fit_polynomials.WIDER}
        table["blocks"].append({**entry, **sizes, "largest": most * fit_polynomials.WIDER})
    return table
