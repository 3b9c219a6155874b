"""Rows that can be read off: components whose mean sits on one example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from fedfm.audits.audit import Audit
from fedfm.audits.fedpft_view import SentClass, View
from fedfm.audits.finding import Finding, nothing
from fedfm.audits.inference import copies, rates
from fedfm.audits.replay import Replay
from fedfm.methods.fedpft.mixtures.singles import ALONE

QUESTION = "Do components of the mixtures give away single rows?"
SHARE = 0.05  # of the typical distance between neighbours: nearer than that a mean is a copy
LONE = ALONE - 0.005  # examples of a component below which it stands for one; what float16 rounds is no example
NAMED = 1000  # leaks named one by one
STRANGERS = 2000  # rows to compare with


class Reconstruction(Audit):
    """Distances of component means to rows, against the distance of neighbours and that to rows never used."""

    methods: ClassVar[tuple[str, ...]] = ("fedpft",)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        view = View(replay)
        gaps = {c: _gap(view, c) for c in sorted({cell.label for cell in view.cells})}
        named, ratios, components = [], [], 0
        for cell in view.cells:
            if cell.mixture is None or not len(cell.rows):
                continue
            leaks, near = _of(view, cell, gaps[cell.label])
            named += leaks
            ratios += near
            components += cell.mixture.components
        if not components:
            return [nothing("reconstruction", QUESTION, "No mixture came out of the messages.")]
        total = sum(len(c.rows) for c in view.cells)
        hit = len({leak["row"] for leak in named})
        low, high = rates.clopper_pearson(hit, total)
        detail: dict[str, Any] = {"components": components, "rows": total, "leaking_components": len(named)}
        if ratios:
            detail |= {"nearest_ratio": min(ratios), "median_ratio": float(np.median(ratios)), "share": SHARE}
        detail["leaks"] = named[:NAMED]
        return [
            Finding(
                "reconstruction",
                QUESTION,
                hit / max(total, 1),
                low,
                high,
                0.0,
                "leaks" if named else "holds",
                _sentence(named, hit, total, ratios),
                False,
                detail,
            )
        ]


def _gap(view: View, label: int) -> float:
    """Typical distance between neighbours of a class, wherever they are."""
    held = view.federated.test[view.labels[view.federated.test] == label]
    return copies.typical_gap(view.features(np.concatenate([view.of_class(label), held])))


def _of(view: View, cell: SentClass, gap: float) -> tuple[list[dict[str, Any]], list[float]]:
    """(components that sit on one row, distances to the nearest row in typical ones)."""
    assert cell.mixture is not None  # noqa: S101 - the caller passes over the others
    strangers = [view.held_out(cell.client, cell.label)]
    if view.method.topology == "star":  # in a chain others' rows went into the fit too
        strangers.append(view.of_class(cell.label, without=cell.client))
    never = np.unique(np.concatenate(strangers))
    never = never[:: -(-len(never) // STRANGERS)] if len(never) else never
    means = cell.mixture.means
    index, distance = copies.nearest(means, view.features(cell.rows))
    _, by_chance = copies.nearest(means, view.features(never))
    carried = cell.mixture.weights * cell.size
    # Noisy counts and rounded weights say nothing about how many examples a component has.
    told = view.plan is None and view.method.counts == "exact"
    alone = carried < LONE if told else np.zeros(len(means), dtype=bool)
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
        near = f": the nearest is {min(ratios):.2g} times as far from a row as neighbours are" if ratios else ""
        return f"No component sits on a single row{near}."
    first, many = named[0], len(named) > 1
    return (
        f"{len(named)} component{'s stand' if many else ' stands'} for one example each and give{'' if many else 's'} "
        f"away {hit} of {total} training rows, e.g. component {first['component']} of {first['client']}'s "
        f"{first['class']}; audit.json names the rows. A larger min_count or fewer components prevent copies; only "
        "differential privacy prevents the rest."
    )
