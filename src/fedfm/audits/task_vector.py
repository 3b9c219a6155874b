"""Measure what task vectors disclose to the server, which receives them, and to clients, which receive aggregates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from fedfm.audits.audit import Audit
from fedfm.audits.fedbip_colluders import colluders
from fedfm.audits.fedbip_view import ALIGNED, Eye, Scored, alignments, at_rank, public
from fedfm.audits.finding import ABOVE, Finding, VerdictRule, interval, nothing, plural
from fedfm.audits.head_view import Names, head_names
from fedfm.audits.inference import rates, task_vector
from fedfm.audits.inference.rates import NOTABLE, Array
from fedfm.audits.member_scores import CellScores, MemberScores, finding_on_rate
from fedfm.audits.replay import Replay, own_sources
from fedfm.core.client import ClientId
from fedfm.core.rows import Rows
from fedfm.linalg.threads import torch_threads
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run
from fedfm.training import SGD, TrainsLocally

LABELS = "Can the server tell from a task vector which classes a client has?"
SHARES = "Can the server tell from a task vector how many rows of each class a client has?"
MEMBERSHIP = "Can the server tell from a client's task vectors which rows it trained on?"
TPR = "How many rows does the server name as members while it accuses one stranger in a hundred?"
NEIGHBOURS = "Do the weights disclose which clients have the same kind of rows?"
NAME = "task_vector"
EACH = 0.975  # confidence of each interval in a finding with two tests
EITHER = VerdictRule(("low > bound", "low by gradients > bound"), ("high <= bound", "high by gradients <= bound"))


class TaskVector(Audit):
    """Infers labels and rows from a task vector, and similar clients from the weights between clients. Also computes a
    client's vector from everything that the other clients know.

    It reads runs of methods whose clients return the change of the vector that they received, and whose server needs
    each client's own reply.
    """

    methods: ClassVar[tuple[str, ...]] = ("fedbip", "fedamp", "fedawa")
    replies: ClassVar[bool] = False
    takes: ClassVar[float] = 10.0

    def unfit(self, run: Run) -> str | None:
        return None if run.manifest["result"]["rounds"] else "the run has no rounds, so no task vector was sent"

    def watch(self, run: Run) -> Eye:
        return Eye(run)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        eye = replay.watch(Eye)
        with torch_threads(1):
            found = [*_labels(replay, eye), *_membership(replay, eye)]
            return [*found, _neighbours(replay, eye), *colluders(replay, eye.full)]


# --- (a) labels -------------------------------------------------------------------------------------------------------


def _labels(replay: Replay, eye: Eye) -> list[Finding]:
    name, shares_name = f"{NAME}.labels", f"{NAME}.shares"
    population, model = replay.population, replay.population.model
    names, labels = head_names(model), population.federated.table.labels
    if names is None or labels is None or not eye.heads:
        why = "No classification head is trained, so the question does not apply."
        return [nothing(name, LABELS, why), nothing(shares_name, SHARES, why)]
    counts = _counts(population, len(model.classes))
    feature = None
    if names.bias is None:
        feature = model.features(public(population)).double().mean(0).numpy()
    evidence = {}
    for c, head in eye.heads.items():
        bias = head[names.bias].double().numpy() if names.bias is not None else None
        evidence[c] = task_vector.class_evidence(head[names.weight].double().numpy(), bias, feature)
    return [_presence(eye, name, counts, evidence), _proportions(replay, eye, shares_name, counts, names)]


def _counts(population: Partitioned, classes: int) -> dict[ClientId, Array]:
    """For each client, the label counts (C,) of the rows as it trains on them, since an attacker may change labels."""
    labels = {c: population.data(c).train.labels for c in population.clients}
    return {c: np.bincount(y.numpy(), minlength=classes) for c, y in labels.items() if y is not None}


def _presence(eye: Eye, name: str, counts: Mapping[ClientId, Array], evidence: Mapping[ClientId, Array]) -> Finding:
    mixed = [c for c in evidence if 0 < (counts[c] > 0).sum() < len(counts[c])]
    if not mixed:
        return nothing(name, LABELS, "Every client has every class, so there is nothing to infer.")
    by_client = np.array([rates.auc(evidence[c][counts[c] > 0], evidence[c][counts[c] == 0]) for c in mixed])
    mean, (low, high) = float(by_client.mean()), rates.mean_interval(by_client)
    pushed = [((evidence[c] > 0) == (counts[c] > 0)).mean() for c in mixed]
    says = f"The logit of a class that a client has rises more than that of a class it lacks, with chance {mean:.3f} "
    says += f"{interval(low, high)} (mean of {plural(len(mixed), 'client')}, from their first message; 0.5 is "
    says += f"guessing). For {100 * float(np.mean(pushed)):.0f} % of the pairs of client and class "
    says += "the sign of the change alone is right."
    detail = {"clients": len(mixed), "right_by_sign": float(np.mean(pushed))}
    return Finding(name, LABELS, mean, low, high, NOTABLE, ABOVE, says, False, detail)


def _proportions(replay: Replay, eye: Eye, name: str, counts: Mapping[ClientId, Array], names: Names) -> Finding:
    method = replay.run.experiment.method
    local = method.local.plain if isinstance(method, TrainsLocally) else None
    why = ""
    if not isinstance(local, SGD) or local.momentum or local.weight_decay:
        why = "Only plain SGD moves a bias by a known step; with this optimiser the audit cannot compute shares."
    elif names.bias is None or not eye.predicted:
        why = "To compute shares, the audit needs a head with a bias, and rows that the server has itself."
    if why:
        return nothing(name, SHARES, why)
    assert isinstance(local, SGD) and names.bias is not None  # noqa: S101, PT018 - above
    everywhere = sum(counts.values(), np.zeros(len(replay.population.model.classes)))
    rows = len(public(replay.population))
    found, guessed = [], []
    for c, q in eye.predicted.items():
        if not (n := int(counts[c].sum())):
            continue
        steps = local.learning_rate * local.steps(n, replay.population.model)
        shares = task_vector.class_shares(eye.heads[c][names.bias].double().numpy(), steps, q)
        found.append(task_vector.overlap(shares, counts[c] / n))
        guessed.append(task_vector.overlap(everywhere / everywhere.sum(), counts[c] / n))
    mean, line = float(np.mean(found)), float(np.mean(guessed))
    low, high = rates.mean_interval(np.array(found))
    says = f"The computed shares of the classes overlap with a client's true shares by {mean:.3f} "
    says += f"{interval(low, high)} (1: equal); the shares over all clients overlap by {line:.3f}. The attacker knows "
    says += f"the client's number of rows and has {rows} rows of its own."
    detail = {"clients": len(found), "rows_of_the_server": rows}
    return Finding(name, SHARES, mean, low, high, line, ABOVE, says, False, detail)


# --- (b) membership ---------------------------------------------------------------------------------------------------


def _membership(replay: Replay, eye: Eye) -> list[Finding]:
    name, tpr_name = f"{NAME}.membership", f"{NAME}.membership_tpr"
    scored = {c: s for c, s in eye.scored_rows(replay.population).items() if len(s.drop[0]) and len(s.drop[1])}
    if not scored:
        why = (
            "No client has both training rows and similar rows that nobody trained on, so there is nothing to compare."
        )
        return [nothing(name, MEMBERSHIP, why), nothing(tpr_name, TPR, why)]
    own = own_sources(replay.run)
    drops = [c for s in scored.values() for c in _cells(s, *s.drop)]
    each = max(ALIGNED // (2 * len(scored)), 4)
    aligned, draw = list[CellScores](), eye.rng("aligned")
    for s in scored.values():
        if s.last is None:
            continue
        few = Scored(*_some(s, each, draw))
        model = replay.population.model
        with at_rank(model, *s.last) as last:
            aligned += _cells(few, *(alignments(model, rows, *last) for rows in (few.members, few.strangers)))
    sizes = [len(s.strangers) for s in scored.values()]
    strangers = sum(sizes) if own else max(sizes)  # every client is compared with the same global test rows
    scores = MemberScores(drops, lambda level: eye.rng("membership"), strangers, digits=4)
    mean, low, high = scores.interval(EACH)
    g_mean, g_low, g_high = mean, low, high
    if aligned:
        fewer = min(strangers, sum(len(cell.strangers) for cell in aligned))
        by_gradients = MemberScores(aligned, lambda level: eye.rng("alignment"), fewer, digits=4)
        g_mean, g_low, g_high = by_gradients.interval(EACH)
    of = "of its classes " if any(s.members.labels is not None for s in scored.values()) else ""
    says = f"Scored by the fall of its loss over all rounds, a training row of a client is above a row {of}that nobody "
    says += f"trained on, with chance {mean:.3f} [{low:.3f}, {high:.3f}]; scored by the cosine of its gradient with "
    says += f"the client's last task vector, with chance {g_mean:.3f} [{g_low:.3f}, {g_high:.3f}]. 0.5 is guessing."
    detail: dict[str, Any] = {"clients": len(scored), "cells": len(drops)}
    detail |= {"members": sum(len(s.members) for s in scored.values()), "strangers": strangers}
    detail |= {"alignment": {"auc": g_mean, "low": g_low, "high": g_high}}
    by = {"low by gradients": g_low, "high by gradients": g_high}
    found = Finding(name, MEMBERSHIP, mean, low, high, NOTABLE, EITHER.with_numbers(by), says, False, detail)
    return [found, _tpr(tpr_name, scores, eye.rng("tpr"))]


def _some(s: Scored, most: int, rng: np.random.Generator) -> tuple[Rows, Rows]:
    a, b = (r.take(rng.permutation(len(r))[:most]) for r in (s.members, s.strangers))
    return a, b


def _cells(s: Scored, members: Array, strangers: Array) -> list[CellScores]:
    """Scores of members and strangers by class, since classes differ in difficulty."""
    a, b = s.members.labels, s.strangers.labels
    if a is None or b is None:
        return [CellScores(members, strangers)]
    x, y = a.numpy(), b.numpy()
    return [CellScores(members[x == c], strangers[y == c]) for c in np.intersect1d(x, y)]


def _tpr(name: str, scores: MemberScores, rng: np.random.Generator) -> Finding:
    rate = scores.rate(rng)
    if rate is None:
        return nothing(name, TPR, f"No client has {rates.FEW} rows of a class that nobody trained on.")
    detail = {
        "members": rate.positives,
        "stranger_scores": rate.negatives,
        "false_alarms": rate.alarms / rate.negatives,
    }
    return finding_on_rate(name, TPR, rate, detail)


# --- (c) who resembles whom -------------------------------------------------------------------------------------------


def _neighbours(replay: Replay, eye: Eye) -> Finding:
    name = f"{NAME}.neighbours"
    if not eye.p:
        return nothing(name, NEIGHBOURS, "This method computes no weights between clients, so there is no map.")
    what, group = groups(replay)
    known = [i for i, c in enumerate(replay.population.clients) if c in group]
    asked = sum((p != 0).any((0, 2)).astype(int) for p in eye.p)
    mean = sum(p.mean(0) for p in eye.p) / np.maximum(asked, 1)[:, None]  # (K, K)
    g = [group.get(c) for c in replay.population.clients]
    tried = [i for i in known if asked[i] and len(known) > 1]
    chances = [sum(g[k] == g[i] for k in known if k != i) / max(len(known) - 1, 1) for i in tried]
    if not tried or not any(chances):
        return nothing(name, NEIGHBOURS, f"No two clients have the same {what}, so a neighbour cannot disclose it.")
    if min(chances) == 1:
        return nothing(name, NEIGHBOURS, f"All clients have the same {what}, so a neighbour discloses nothing.")
    off = mean.copy()
    np.fill_diagonal(off, -np.inf)
    right = [g[i] == g[known[int(off[i, known].argmax())]] for i in tried]
    estimate, line = float(np.mean(right)), float(np.mean(chances))
    low, high = rates.clopper_pearson(sum(right), len(right))
    says = f"For {sum(right)} of {len(right)} clients the client with the largest weight has the same {what}; any "
    says += f"other client has it with chance {line:.3f}. weights.npz and the map in the report disclose this."
    detail = {"of": what, "clients": len(tried), "groups": len(set(g))}
    return Finding(name, NEIGHBOURS, estimate, low, high, line, ABOVE, says, False, detail)


def groups(replay: Replay) -> tuple[str, dict[ClientId, str]]:
    """Return (words for what clients of a group have in common, the group of each client).

    If several clients share a value in the partition's column, a client's group is the client's value. Otherwise it is
    the client's largest class.
    """
    table, spec = replay.population.federated.table, replay.run.experiment.data
    clients = replay.population.federated.clients
    column = spec.partition.column if spec.partition.name == "by_column" else None
    if column:
        values = {c: str(table.columns[column][rows.train[0]]) for c, rows in clients.items()}
        if len(set(values.values())) < len(values):
            return f'"{column}"', values
    if table.labels is None or not table.classes:
        return "kind of rows", {c: c for c in clients}
    most = {c: int(np.bincount(table.labels[rows.train]).argmax()) for c, rows in clients.items()}
    return "largest class", {c: table.classes[k] for c, k in most.items()}
