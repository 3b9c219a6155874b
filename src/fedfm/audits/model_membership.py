"""Membership inference on the final model of any run: does the model reveal whether a row was trained on?

If shadow runs are cheap, the attack is the likelihood ratio of Carlini et al. (arXiv:2112.03570). Otherwise it is the
loss threshold of Yeom et al. (arXiv:1709.01604), with one threshold per class as in Song and Mittal (arXiv:2003.10595).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedfm import seeds
from fedfm.audits.expert_membership import ExpertMembership
from fedfm.audits.final_model import FinalModelAudit
from fedfm.audits.finding import Finding, nothing
from fedfm.audits.inference.rates import FEW, Array
from fedfm.audits.inference.shadow_ratio import log_ratio
from fedfm.audits.member_scores import CellScores, MemberScores, finding_on_rate
from fedfm.audits.membership import Membership
from fedfm.audits.replay import Replay
from fedfm.audits.row_evidence import by_class, evidence, unreadable
from fedfm.audits.shadow_runs import Half, RowPool, affordable, cost, shadow_models, training_clients, unit
from fedfm.audits.stated_epsilon import claim_of_model
from fedfm.core.client import POOLED, ClientId
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.linalg.threads import torch_threads
from fedfm.models.adapter_reading import load_adapter
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.predictions import keeps_parts, personal
from fedfm.runtime.result_match import final_state
from fedfm.runtime.run_directory import Run

QUESTION = "Can a reader of the final model tell which rows it was trained on?"
QUESTION_TPR = "How many training rows does the final model disclose if one stranger in a hundred is accused wrongly?"
Models = Mapping[ClientId, Params]


class ModelMembership(FinalModelAudit):
    """Compares each client's training rows with test rows of the same distribution, by the client's final model."""

    def seconds(self, run: Run, population: Partitioned) -> float:
        return max(affordable(run, population) * cost(run, population), self.takes)

    def reads(self, run: Run) -> bool:
        # For these methods another audit asks the same question about their messages.
        others = {*Membership.methods, *ExpertMembership.methods}
        return unreadable(run) is None and run.experiment.method_name not in others

    def why_unread(self, run: Run) -> str:
        return unreadable(run) or f"for runs of {run.experiment.method_name} another attack asks the same question"

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        run = replay.run
        with torch_threads(1):
            population = replay.fresh()
            cells, how = attack(run, population, final_models(run, population), notice)
        if not cells:
            why = "No client has all that is compared: training rows, test rows and a stored model."
            return [nothing("model_membership", QUESTION, why), nothing("model_membership_tpr", QUESTION_TPR, why)]
        seed, of = run.experiment.run.seed, unit(population)
        purpose = ("audit", "model membership")
        scores = MemberScores(cells, lambda level: seeds.generator(seed, *purpose, str(level)), digits=6)
        return [_auc(run, scores, how, of), _tpr(run, scores, how, of)]


def final_models(run: Run, population: Partitioned) -> dict[ClientId, Params]:
    """The final models in the run directory: one per client if each has its own, otherwise one under the key ""."""
    method = run.experiment.method
    state = final_state(run, method.state_type)
    if not personal(method):
        return {"": method.params_for(state, "")}
    if not keeps_parts(method):
        return {c: method.params_for(state, c) for c in population.clients}
    found = {}
    for client in population.clients:
        try:
            found[client] = load_adapter(population.model, run.adapter(client))
        except InputError:  # the client's model was not disclosed
            continue
    return found


def attack(
    run: Run, population: Partitioned, models: Models, notice: Callable[[str], None]
) -> tuple[list[CellScores], str]:
    """Return (scores of members and strangers of each client that trained, a description of the attack).

    Args:
        population: the rows, and the model as it was at the start of the run.
    """
    (cells,), how = attack_all(run, population, [models], {*training_clients(run, population.clients), POOLED}, notice)
    return list(cells.values()), how


def attack_all(
    run: Run,
    population: Partitioned,
    targets: Sequence[Models],
    owners: Collection[ClientId],
    notice: Callable[[str], None],
) -> tuple[list[dict[ClientId, CellScores]], str]:
    """As :func:`attack`, for several attacked models, which share the shadow runs: the scores by owner of each.

    Args:
        owners: the owners whose rows are attacked.
    """
    models = {c: w for target in targets for c, w in target.items()}
    seed, pooled = run.experiment.run.seed, run.experiment.method.needs.pooled
    pool = RowPool(population, seed, pooled=pooled)
    clients = [c for c in pool.honest if c in owners and (c in models or "" in models)]
    clients = [c for c in clients if len(pool.members[c]) and len(pool.strangers[c])]
    if not clients:
        return [{} for _ in targets], ""
    number, w_0 = affordable(run, population), population.model.params()
    found, inside = {c: list[Array]() for c in clients}, {c: list[Array]() for c in clients}
    for s in range(number):
        if s % 4 == 0:
            notice(f"shadow run {s + 1} of {number}")
        half = Half(pool, s, seed)
        population.model.load(w_0)
        shadows = shadow_models(run, half, s)
        for c in clients:
            if (w := shadows.get(c, shadows.get(""))) is not None:
                found[c].append(_of(run, population, w, pool, c))
                inside[c].append(half.taken[c][1])
    cells = [dict[ClientId, CellScores]() for _ in targets]
    for target, its in zip(targets, cells, strict=True):
        for c in clients:
            scores, split = _of(run, population, target.get(c) or target[""], pool, c), len(pool.members[c])
            if number and len(found[c]) == number:
                scores = log_ratio(scores, np.stack(found[c]), np.stack(inside[c]))
            else:
                scores = by_class(scores, pool.labels(c))
            its[c] = CellScores(scores[:split], scores[split:])
    each = "" if pool.labels(clients[0]) is None else ", with one threshold for each class"
    if population.trains_on_blocks:
        each = ", with one threshold for whole blocks and one for shorter ones"
    return cells, f"the likelihood ratio over {number} shadow runs" if number else f"the loss{each}"


def _of(run: Run, population: Partitioned, w: Params, pool: RowPool, client: ClientId) -> Array:
    return evidence(run.experiment.method, population.model, w, pool.compared_rows(client))


def _auc(run: Run, scores: MemberScores, how: str, of: str) -> Finding:
    detail = {"attack": how, **scores.of_clients(), "highest_of_a_client": float(scores.aucs.max())}
    says = f"By {how}, a training row scores above a test row"
    return scores.finding("model_membership", QUESTION, says, detail, claim_of_model(run), unit=of)


def _tpr(run: Run, scores: MemberScores, how: str, of: str) -> Finding:
    name = "model_membership_tpr"
    rate = scores.rate(seeds.generator(run.experiment.run.seed, "audit", "model membership tpr"))
    if rate is None:
        return nothing(name, QUESTION_TPR, f"No client has {FEW} test rows.")
    detail = {"hits": rate.hits, "members": rate.positives, "false_alarms": rate.alarms, "strangers": rate.negatives}
    return finding_on_rate(name, QUESTION_TPR, rate, detail, by=how, strangers=f"{rate.negatives} test rows", unit=of)
