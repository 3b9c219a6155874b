"""Classes that one client alone has: what a message says about them is said about this client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from fedfm.audits.audit import Audit
from fedfm.audits.fedpft_view import SentClass, View
from fedfm.audits.finding import Finding, Verdict
from fedfm.audits.replay import Replay

QUESTION = "What is revealed about a class that one client alone has?"
STANDS_OUT = 4.0  # standard deviations of the noise on a count


class SingleHolder(Audit):
    """That the client has it, how many rows of it, and what they are like on average."""

    methods: ClassVar[tuple[str, ...]] = ("fedpft",)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        view = View(replay)
        found = [_revealed(view, cell) for cell in view.cells if _alone(view, cell)]
        noisy = view.plan is not None and not view.plan.counts_public
        seen = [f for f in found if not noisy or f["stands_out"]]
        # A promise about single rows says nothing about classes of many.
        verdict: Verdict = "holds" if not seen else "inconclusive" if view.plan is not None else "leaks"
        return [
            Finding(
                "single_holder",
                QUESTION,
                float(len(seen)),
                None,
                None,
                0.0,
                verdict,
                _sentence(view, seen),
                False,
                {"classes": found},
            )
        ]


def _alone(view: View, cell: SentClass) -> bool:
    everywhere = len(view.of_class(cell.label))
    return bool(len(cell.rows)) and everywhere == len(cell.rows)


def _revealed(view: View, cell: SentClass) -> dict[str, Any]:
    true, told = view.features(cell.rows).astype(np.float64).mean(0), cell.total
    length = float(np.linalg.norm(true) * np.linalg.norm(told))
    noise = view.plan.count_sigma if view.plan is not None else 0.0
    return {
        "client": cell.client,
        "class": view.classes[cell.label],
        "count_told": cell.count,
        "count_true": len(cell.rows),
        "cosine_of_the_mean": float(true @ told) / length if length else None,
        "stands_out": cell.count > STANDS_OUT * noise,
    }


def _sentence(view: View, seen: list[dict[str, Any]]) -> str:
    if not seen:
        return "Nothing: no class is visibly at one client alone."
    f = seen[0]
    told = (
        f"{len(seen)} of {len(view.classes)} classes are at one client alone, so that what is told of such a class, "
        f"and what the model knows of it, is about this client: {f['client']} has "
        f"{f['count_told']:.0f} rows of {f['class']}"
    )
    if f["cosine_of_the_mean"] is not None:
        told += f", whose mean is known to cosine {f['cosine_of_the_mean']:.3f}"
    if view.plan is not None:
        told += "; what is promised protects single rows, not that a client has a class"
    return told + "."
