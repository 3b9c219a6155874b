"""Membership inference on the mixtures that clients send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fedfm import seeds
from fedfm.audits.audit import Audit
from fedfm.audits.fedpft_view import SentClass, View
from fedfm.audits.finding import ABOVE, Finding, nothing
from fedfm.audits.inference import likelihood_ratio
from fedfm.audits.inference.likelihood_ratio import Density
from fedfm.audits.inference.rates import FEW, Array
from fedfm.audits.member_scores import CellScores, MemberScores, finding_on_rate
from fedfm.audits.replay import Replay
from fedfm.audits.stated_epsilon import claim
from fedfm.methods.fedpft import noisy_moments
from fedfm.methods.fedpft.mixtures import fit, fit_without_singles
from fedfm.methods.fedpft.mixtures.uncounted import round_to_grid
from fedfm.methods.fedpft.summary import gaussian

QUESTION = "Can the server tell from a client's mixture which rows it was fitted to?"
QUESTION_TPR = "How many rows does the server name as members while it accuses one stranger in a hundred?"
SIZES = (1, 10, 20, 50, 200)  # cells (a client's class) are grouped by size: each group's smallest number of rows
LEAST = 20  # a group counts in the verdict if its cells have at least this many rows in total
MOST = 1000  # largest number of rows that a shadow is fitted to
STRICT = 0.999  # confidence that is needed to contradict a claim


@dataclass(frozen=True)
class _Scored:
    cell: SentClass
    scores: CellScores


class Membership(Audit):
    """Measures how well mixtures separate the rows in them from other rows: AUC, and TPR at 1 % false positives."""

    methods: ClassVar[tuple[str, ...]] = ("fedpft",)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        view = View(replay)
        scored = [s for s in _score(view) if all(map(len, s.scores))]
        if not scored:
            why = "No class in the messages has rows that nobody trained on, so there is nothing to compare with."
            return [nothing("membership", QUESTION, why), nothing("membership_tpr", QUESTION_TPR, why)]
        cells = [s.scores for s in scored]
        strangers = len({int(i) for s in scored for i in view.held_out(s.cell.client, s.cell.label)})
        scores = MemberScores(cells, lambda confidence: view.rng("bootstrap"), strangers)
        return [_auc(view, scores), _tpr(view, scores)]


def _score(view: View) -> list[_Scored]:
    """Score each cell's members (its rows) and strangers (rows that nobody trained on), by its mixture and a shadow."""
    shadows = _Shadows(view)
    out = []
    for cell in view.cells:
        if cell.mixture is None:
            continue
        shadow, strangers = shadows(cell)
        if shadow is None or not len(strangers):
            continue
        rows = (view.features(index) for index in (cell.rows, strangers))
        out.append(_Scored(cell, CellScores(*(likelihood_ratio.scores(x, cell.mixture, shadow) for x in rows))))
    return out


class _Shadows:
    """Shadows: mixtures that are fitted to other rows of the class in the same way as the client's mixture.

    The clients that have a class are divided into two halves. A mixture fitted to the rows of one half is the shadow
    for all clients of the other half. This takes two fits for a class, not one for each client. If only one client has
    the class, its shadow is fitted to half of the rows that nobody trained on.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._fits: dict[tuple[Any, ...], Density] = {}

    def __call__(self, cell: SentClass) -> tuple[Density | None, Array]:
        view, strangers = self._view, self._view.held_out(cell.client, cell.label)
        owners = sorted({c.client for c in view.cells if c.label == cell.label})
        half = {c: i % 2 for i, c in enumerate(view.rng("halves", cell.label).permutation(owners).tolist())}
        others = [c.rows for c in view.cells if c.label == cell.label and half[c.client] != half[cell.client]]
        rows: Array = np.concatenate([np.zeros(0, dtype=np.int64), *others])
        key: tuple[Any, ...] = (cell.label, half[cell.client])
        if len(rows) < min(len(cell.rows), LEAST):
            strangers = view.rng("strangers", cell.client, cell.label).permutation(strangers)
            rows, strangers = strangers[: len(strangers) // 2], strangers[len(strangers) // 2 :]
            key = (cell.label, cell.client)
        if not len(rows):
            return None, strangers
        assert cell.mixture is not None  # noqa: S101 - _score() skips cells without one
        key = (*key, cell.mixture.components)
        if key not in self._fits:
            chosen = np.sort(view.rng("shadow", *map(str, key)).permutation(rows)[:MOST])
            self._fits[key] = _fit(view, view.features(chosen), cell.mixture.components, key)
        return self._fits[key], strangers


def _fit(view: View, x: Array, components: int, key: tuple[Any, ...]) -> Density:
    """Fit a density to the rows x in the same way as clients do."""
    if view.plan is None or components > 1:
        seed = seeds.derive(view.replay.run.experiment.run.seed, "audit", "shadow em", *map(str, key))
        em = fit_without_singles if view.plan is None else fit
        found = em([x], [min(components, len(x))], view.method.shape, seeds=[seed])[0].mixture
        return round_to_grid(found) if view.method.counts == "withheld" else found
    return gaussian(*noisy_moments.normal_of(noisy_moments.statistics(x, view.plan), 0.0)[1:])


def _auc(view: View, scores: MemberScores) -> Finding:
    groups, lows = {}, []
    for first, beyond in zip(SIZES, (*SIZES[1:], np.inf), strict=True):
        index = np.flatnonzero((scores.sizes >= first) & (scores.sizes < beyond))
        if not len(index):
            continue
        label = f"{first} or more" if beyond == np.inf else f"{first} to {int(beyond) - 1}"
        auc, low, high = scores.interval(0.99, index)  # at 99 %, because there are five tests
        groups[label] = {"auc": auc, "low": low, "high": high, "rows": int(scores.sizes[index].sum())}
        if groups[label]["rows"] >= LEAST:
            lows.append(low)
    # The AUC of a few rows may be large by chance, so the sentence leaves out small groups, as the verdict does.
    large = {k: g["auc"] for k, g in groups.items() if g["rows"] >= LEAST} or {k: g["auc"] for k, g in groups.items()}
    top = max(large, key=lambda k: large[k])
    rule = ABOVE
    if lows:
        name = "largest low at 99 % of classes of one size"
        rule = replace(ABOVE, leaks=(*ABOVE.leaks, f"{name} > bound")).with_numbers({name: max(lows)})
    detail: dict[str, Any] = {
        "by_rows_of_the_class": groups,
        "cells": len(scores.cells),
        "members": int(scores.sizes.sum()),
    }
    detail |= {"strangers": scores.strangers, "shadow": "the same recipe on other rows of the class"}
    return scores.finding(
        "membership",
        QUESTION,
        "A row that was in the fit scores above one that was not",
        detail,
        claim(view.replay.run),
        rule=rule,
        strict=STRICT,
        more=f"; for classes of {top} rows at a client it is {large[top]:.3f}",
    )


def _tpr(view: View, scores: MemberScores) -> Finding:
    name = "membership_tpr"
    rate = scores.rate(view.rng("bootstrap tpr"))
    if rate is None:
        return nothing(name, QUESTION_TPR, f"No class has {FEW} rows that nobody trained on.")
    detail = {"threshold": rate.threshold, "hits": rate.hits, "members": rate.positives}
    detail |= {"false_alarms": rate.alarms, "stranger_scores": rate.negatives}
    return finding_on_rate(name, QUESTION_TPR, rate, detail)
