"""Membership inference on the mixtures that clients sent: whose row was in which fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedfm import seeds
from fedfm.audits.audit import Audit
from fedfm.audits.fedpft_view import Array, SentClass, View
from fedfm.audits.finding import Finding, Verdict, nothing
from fedfm.audits.inference import rates
from fedfm.audits.inference.likelihood_ratio import Density, scores
from fedfm.audits.inference.one_run import largest_auc
from fedfm.audits.replay import Replay
from fedfm.audits.stated_epsilon import claim
from fedfm.methods.fedpft import noisy_moments
from fedfm.methods.fedpft.mixtures import fit, fit_without_singles
from fedfm.methods.fedpft.mixtures.uncounted import rounded
from fedfm.methods.fedpft.summary import gaussian

QUESTION = "Can the server tell from a client's mixture which rows it was fitted to?"
QUESTION_TPR = "How many rows does the server name as members while it accuses one stranger in a hundred?"
NOTABLE, NOTABLE_TPR, ALARMS = 0.55, 0.05, 0.01  # an attacker that only guesses has AUC 0.5 and TPR 0.01
SIZES = (1, 10, 20, 50, 200)  # rows of a class at a client, where groups of cells begin
FEW = 5  # strangers without whom scores have no scale
LEAST = 20  # rows of a group that has a verdict of its own
MOST = 1000  # rows of a shadow
STRICT = 0.999  # confidence of what is called a contradiction


@dataclass(frozen=True)
class _Scored:
    cell: SentClass
    members: Array
    strangers: Array


class Membership(Audit):
    """AUC, and the true positives at one false one in a hundred."""

    methods: ClassVar[tuple[str, ...]] = ("fedpft",)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        view = View(replay)
        scored = [s for s in _score(view) if len(s.members) and len(s.strangers)]
        if not scored:
            why = "No class was sent of which there are rows that nobody trained on: nothing to compare with."
            return [nothing("membership", QUESTION, why), nothing("membership_tpr", QUESTION_TPR, why)]
        return [_auc(view, scored), _tpr(view, scored)]


def _score(view: View) -> list[_Scored]:
    """Every cell's members and strangers under its mixture, beside a shadow fitted to rows that are neither."""
    shadows = _Shadows(view)
    out = []
    for cell in view.cells:
        if cell.mixture is None:
            continue
        shadow, strangers = shadows(cell)
        if shadow is None or not len(strangers):
            continue
        rows = (view.features(index) for index in (cell.rows, strangers))
        out.append(_Scored(cell, *(scores(x, cell.mixture, shadow) for x in rows)))
    return out


class _Shadows:
    """The same recipe on other rows of the class.

    The clients of a class fall into two halves, each of which is the shadow of the other: two fits instead of one a
    client. Where only one client has the class, half of the rows that nobody trained on are the shadow.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._fits: dict[tuple[Any, ...], Density] = {}

    def __call__(self, cell: SentClass) -> tuple[Density | None, Array]:
        view, strangers = self._view, self._view.held_out(cell.client, cell.label)
        holders = sorted({c.client for c in view.cells if c.label == cell.label})
        half = {c: i % 2 for i, c in enumerate(view.rng("halves", cell.label).permutation(holders).tolist())}
        others = [c.rows for c in view.cells if c.label == cell.label and half[c.client] != half[cell.client]]
        rows: Array = np.concatenate([np.zeros(0, dtype=np.int64), *others])
        key: tuple[Any, ...] = (cell.label, half[cell.client])
        if len(rows) < min(len(cell.rows), LEAST):
            strangers = view.rng("strangers", cell.client, cell.label).permutation(strangers)
            rows, strangers = strangers[: len(strangers) // 2], strangers[len(strangers) // 2 :]
            key = (cell.label, cell.client)
        if not len(rows):
            return None, strangers
        assert cell.mixture is not None  # noqa: S101 - cells without one are passed over
        key = (*key, cell.mixture.components)
        if key not in self._fits:
            chosen = np.sort(view.rng("shadow", *map(str, key)).permutation(rows)[:MOST])
            self._fits[key] = _same_recipe(view, view.features(chosen), cell.mixture.components, key)
        return self._fits[key], strangers


def _same_recipe(view: View, x: Array, components: int, key: tuple[Any, ...]) -> Density:
    if view.plan is None or components > 1:
        seed = seeds.derive(view.replay.run.experiment.run.seed, "audit", "shadow em", *map(str, key))
        way = fit_without_singles if view.plan is None else fit
        found = way([x], [min(components, len(x))], view.method.shape, seeds=[seed])[0].mixture
        return rounded(found) if view.method.counts == "withheld" else found
    return gaussian(*noisy_moments.normal_of(noisy_moments.statistics(x, view.plan), 0.0)[1:])


def _auc(view: View, scored: Sequence[_Scored]) -> Finding:
    by_cell = np.array([rates.auc(s.members, s.strangers) for s in scored])
    weights = np.array([len(s.members) for s in scored])
    strangers = len({int(i) for s in scored for i in view.held_out(s.cell.client, s.cell.label)})

    def interval(index: Array, confidence: float) -> tuple[float, float, float]:
        mean = float(np.average(by_cell[index], weights=weights[index]))
        low, high = rates.bootstrap(by_cell[index], weights[index], view.rng("bootstrap"), confidence)
        margin = _z(confidence) * rates.auc_error(mean, int(weights[index].sum()), strangers)
        return mean, max(min(low, mean - margin), 0.0), min(max(high, mean + margin), 1.0)

    everything = np.arange(len(scored))
    mean, low, high = interval(everything, 0.95)
    groups, worst = {}, low
    for first, beyond in zip(SIZES, (*SIZES[1:], np.inf), strict=True):
        index = np.flatnonzero((weights >= first) & (weights < beyond))
        if not len(index):
            continue
        label = f"{first} or more" if beyond == np.inf else f"{first} to {int(beyond) - 1}"
        group = interval(index, 0.99)  # five looks instead of one
        groups[label] = {"auc": group[0], "low": group[1], "high": group[2], "rows": int(weights[index].sum())}
        if weights[index].sum() >= LEAST:
            worst = max(worst, group[1])
    detail: dict[str, Any] = {"by_rows_of_the_class": groups, "cells": len(scored), "members": int(weights.sum())}
    detail |= {"strangers": strangers, "shadow": "the same recipe on other rows of the class"}
    says = f"A row that was in the fit scores above one that was not with chance {mean:.3f} [{low:.3f}, {high:.3f}], "
    # Of a handful of rows the largest figure is chance: they have no say here as they have none in the verdict.
    told = {k: g["auc"] for k, g in groups.items() if g["rows"] >= LEAST} or {k: g["auc"] for k, g in groups.items()}
    top = max(told, key=lambda k: told[k])
    says += f"for classes of {top} rows at a client {told[top]:.3f}; 0.5 is guessing"
    verdict: Verdict = "leaks" if worst > NOTABLE else "holds" if high <= NOTABLE else "inconclusive"
    promise, contradicts = claim(view.replay.run), False
    if promise is not None:
        allowed = largest_auc(promise.steps * promise.epsilon, promise.exchange_delta)
        contradicts = interval(everything, STRICT)[1] > allowed
        detail["allowed_by_epsilon"] = allowed
        says += f", and epsilon = {promise.epsilon:g} allows {allowed:.3f}"
    return Finding("membership", QUESTION, mean, low, high, NOTABLE, verdict, f"{says}.", contradicts, detail)


def _tpr(view: View, scored: Sequence[_Scored]) -> Finding:
    """One threshold for all cells, on scores in units of the strangers' spread: noisy cells spread more than others."""
    scored = [_standard(s) for s in scored if len(s.strangers) >= FEW]
    if not scored:
        return nothing("membership_tpr", QUESTION_TPR, f"No class has {FEW} rows that nobody trained on.")
    threshold = rates.threshold_at(np.concatenate([s.strangers for s in scored]), ALARMS)
    hits = np.array([int((s.members > threshold).sum()) for s in scored])
    weights = np.array([len(s.members) for s in scored])
    alarms, tries = (sum(f(s) for s in scored) for f in (lambda s: int((s.strangers > threshold).sum()), _tries))
    tpr = float(hits.sum() / weights.sum())
    cells = rates.bootstrap(hits / weights, weights, view.rng("bootstrap tpr"))
    exact = rates.clopper_pearson(int(hits.sum()), int(weights.sum()))
    low, high = min(cells[0], exact[0]), max(cells[1], exact[1])
    says = (
        f"{100 * tpr:.1f} % of the training rows [{100 * low:.1f}, {100 * high:.1f}] stand out so far that only "
        f"{100 * alarms / tries:.1f} % of strangers do; guessing gives 1 %, the line is {100 * NOTABLE_TPR:.0f} %."
    )
    verdict: Verdict = "leaks" if low > NOTABLE_TPR else "holds" if high <= NOTABLE_TPR else "inconclusive"
    detail = {"threshold": threshold, "hits": int(hits.sum()), "members": int(weights.sum())}
    detail |= {"false_alarms": alarms, "stranger_scores": tries}
    return Finding("membership_tpr", QUESTION_TPR, tpr, low, high, NOTABLE_TPR, verdict, says, False, detail)


def _standard(s: _Scored) -> _Scored:
    middle, spread = float(np.median(s.strangers)), float(s.strangers.std()) or 1.0
    return _Scored(s.cell, (s.members - middle) / spread, (s.strangers - middle) / spread)


def _tries(s: _Scored) -> int:
    return len(s.strangers)


def _z(confidence: float) -> float:
    from scipy.stats import norm

    return float(norm.ppf((1 + confidence) / 2))
