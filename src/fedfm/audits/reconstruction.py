"""Find rows that a mixture discloses because the mean of one of its components equals a single row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from fedfm.audits.audit import Audit
from fedfm.audits.fedpft_view import SentClass, View
from fedfm.audits.finding import COUNT, Finding, nothing
from fedfm.audits.inference import copies, rates
from fedfm.audits.inference.copies import NAMED, SHARE
from fedfm.audits.replay import Replay
from fedfm.methods.fedpft.mixtures.singles import ALONE

QUESTION = "Do components of the mixtures disclose single rows?"
LONE = ALONE - 0.005  # a component with fewer examples stands for one example; the margin is for float16's rounding
STRANGERS = 2000  # largest number of rows that nobody trained on, for comparison


class Reconstruction(Audit):
    """Compares three distances: of components to training rows, of components to unused rows, and between rows."""

    methods: ClassVar[tuple[str, ...]] = ("fedpft",)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        view = View(replay)
        test, gaps = view.federated.test, dict[int, float]()  # for each class, the typical distance between neighbours
        for c in sorted({cell.label for cell in view.cells}):
            every = np.concatenate([view.of_class(c), test[view.labels[test] == c]])
            gaps[c] = copies.typical_gap(view.features(every))
        named, ratios, components = [], [], 0
        for cell in view.cells:
            if cell.mixture is None or not len(cell.rows):
                continue
            leaks, near = _of(view, cell, gaps[cell.label])
            named += leaks
            ratios += near
            components += cell.mixture.components
        if not components:
            return [nothing("reconstruction", QUESTION, "The messages contain no mixture.")]
        total = sum(len(c.rows) for c in view.cells)
        hit = len({leak["row"] for leak in named})
        low, high = rates.clopper_pearson(hit, total)
        detail: dict[str, Any] = {"components": components, "rows": total, "leaking_components": len(named)}
        if ratios:
            detail |= {"nearest_ratio": min(ratios), "median_ratio": float(np.median(ratios)), "share": SHARE}
        detail["leaks"] = named[:NAMED]
        says, rate = _sentence(named, hit, total, ratios), hit / max(total, 1)
        return [Finding("reconstruction", QUESTION, rate, low, high, 0.0, COUNT, says, False, detail)]


def _of(view: View, cell: SentClass, gap: float) -> tuple[list[dict[str, Any]], list[float]]:
    """(the components that equal a single row, each component's distance to the nearest row divided by ``gap``)."""
    assert cell.mixture is not None  # noqa: S101 - the caller skips the others
    strangers = [view.held_out(cell.client, cell.label)]
    if view.method.topology == "star":  # in a chain the fit includes other clients' rows
        strangers.append(view.of_class(cell.label, without=cell.client))
    never = np.unique(np.concatenate(strangers))
    never = never[:: -(-len(never) // STRANGERS)] if len(never) else never
    means = cell.mixture.means
    index, distance = copies.nearest(means, view.features(cell.rows))
    _, by_chance = copies.nearest(means, view.features(never))
    carried = cell.mixture.weights * cell.size
    # Noisy counts and rounded weights do not determine the number of a component's examples.
    exact = view.plan is None and view.method.counts == "exact"
    alone = carried < LONE if exact else np.zeros(len(means), dtype=bool)
    leaks = [
        {
            "client": cell.client,
            "class": view.classes[cell.label],
            "row": int(cell.rows[index[k]]),
            "component": k,
            "ratio": float(distance[k] / gap) if gap else None,
            "carries": float(carried[k]),
        }
        for k in range(len(means))
        if alone[k] or distance[k] < SHARE * min(gap, by_chance[k])
    ]
    return leaks, (distance / gap).tolist() if gap else []


def _sentence(named: list[dict[str, Any]], hit: int, total: int, ratios: list[float]) -> str:
    if not named:
        near = f": the smallest distance is {min(ratios):.2g} times that of neighbouring rows" if ratios else ""
        return f"No component equals a single row{near}."
    first, many = named[0], len(named) > 1
    verbs = ("s stand for one example each", "disclose") if many else (" stands for one example", "discloses")
    return (
        f"{len(named)} component{verbs[0]} and {verbs[1]} {hit} of {total} training rows, e.g. "
        f"component {first['component']} of {first['client']}'s {first['class']}; audit.json names the rows. A larger "
        "min_count or fewer components prevent copies; only differential privacy prevents other disclosure."
    )
