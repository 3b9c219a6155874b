"""Measure what messages about a class disclose if only one client has the class: they describe this client alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from fedfm.audits.audit import Audit
from fedfm.audits.fedpft_view import SentClass, View
from fedfm.audits.finding import COUNT, Finding, VerdictRule
from fedfm.audits.replay import Replay

QUESTION = "What do the messages disclose about a class that only one client has?"
PROMISED = VerdictRule((), ("estimate <= bound",), "a promise about single rows does not cover classes of many rows")
STANDS_OUT = 4.0  # a count is visible if it exceeds this many standard deviations of its noise


class SingleHolder(Audit):
    """Finds out if the server learns three facts: the client has the class, the number of these rows, their mean."""

    methods: ClassVar[tuple[str, ...]] = ("fedpft",)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        view = View(replay)
        alone = (cell for cell in view.cells if 0 < len(cell.rows) == len(view.of_class(cell.label)))
        found = [_cell_details(view, cell) for cell in alone]
        noisy = view.plan is not None and not view.plan.counts_public
        known = [f for f in found if not noisy or f["stands_out"]]
        rule = COUNT if view.plan is None else PROMISED
        says, detail = _sentence(view, known), {"classes": found}
        return [Finding("single_holder", QUESTION, float(len(known)), None, None, 0.0, rule, says, False, detail)]


def _cell_details(view: View, cell: SentClass) -> dict[str, Any]:
    true, sent = view.features(cell.rows).astype(np.float64).mean(0), cell.total
    length = float(np.linalg.norm(true) * np.linalg.norm(sent))
    noise = view.plan.count_sigma if view.plan is not None else 0.0
    return {
        "client": cell.client,
        "class": view.classes[cell.label],
        "count_sent": cell.count,
        "count_true": len(cell.rows),
        "cosine_of_the_mean": float(true @ sent) / length if length else None,
        "stands_out": cell.count > STANDS_OUT * noise,
    }


def _sentence(view: View, known: list[dict[str, Any]]) -> str:
    if not known:
        return "Nothing: no class is visibly at one client alone."
    f = known[0]
    text = f"Number of classes at one client alone: {len(known)} of {len(view.classes)}. Messages about such a class, "
    text += f"and the model's knowledge of it, are about this client: {f['client']} has {f['count_sent']:.0f} rows "
    text += f"of {f['class']}"
    if f["cosine_of_the_mean"] is not None:
        text += f", whose mean has cosine {f['cosine_of_the_mean']:.3f} with the mean in the message"
    if view.plan is not None:
        text += "; the promise protects single rows, not the fact that a client has a class"
    return text + "."
