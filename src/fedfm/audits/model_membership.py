"""Membership inference on the final model of any run: does the model tell whether a row was trained on?

The likelihood ratio of Carlini et al. (arXiv:2112.03570) where shadow runs are cheap, else the loss threshold of Yeom
et al. (arXiv:1709.01604) with one threshold a class, as Song and Mittal (arXiv:2003.10595) calibrate it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedfm import seeds
from fedfm.audits.audit import Audit
from fedfm.audits.expert_membership import ExpertMembership
from fedfm.audits.finding import ABOVE, Finding, nothing
from fedfm.audits.inference import rates
from fedfm.audits.inference.one_run import largest_auc
from fedfm.audits.inference.rates import ALARMS, NOTABLE, NOTABLE_TPR, Array
from fedfm.audits.inference.shadow_ratio import log_ratio
from fedfm.audits.membership import Membership
from fedfm.audits.replay import Replay
from fedfm.audits.row_evidence import by_class, evidence, no_round, unreadable
from fedfm.audits.shadow_runs import Half, RowPool, affordable, cost, shadow_models, unit
from fedfm.audits.stated_epsilon import limit_rule
from fedfm.core.client import ClientId
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.linalg.threads import torch_threads
from fedfm.models.adapter_files import load_adapter
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.predictions import keeps_parts, personal
from fedfm.runtime.run_directory import Run

QUESTION = "Can who has the final model tell which rows it was trained on?"
QUESTION_TPR = "How many training rows does the final model give away while one stranger in a hundred is accused?"
STRICT, Z, Z_STRICT = 0.9999, 1.959964, 3.890592  # confidence of a contradiction; normal quantiles of 95 % and of it
Models = Mapping[ClientId, Params]


@dataclass(frozen=True)
class ClientScores:
    """Scores (n,) of one client's training rows and of strangers; more says "trained on"."""

    client: ClientId
    members: Array
    strangers: Array


class ModelMembership(Audit):
    """Each client's training rows against test rows of the same distribution, under the model that the client uses."""

    replays: ClassVar[bool] = False
    replies: ClassVar[bool] = False

    def seconds(self, run: Run, population: Partitioned) -> float:
        return max(affordable(run, population) * cost(run, population), self.takes)

    def reads(self, run: Run) -> bool:
        # Another audit asks the same question of the values that these methods release.
        others = {*Membership.methods, *ExpertMembership.methods}
        return unreadable(run) is None and run.experiment.method_name not in others

    def unfit(self, run: Run) -> str | None:
        return no_round(run)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        run = replay.run
        with torch_threads(1):
            population = replay.fresh()
            client_scores, how = attack(run, population, final_models(run, population), notice)
        if not client_scores:
            why = "No client has training rows, a model here and test rows to compare with."
            return [nothing("model_membership", QUESTION, why), nothing("model_membership_tpr", QUESTION_TPR, why)]
        of = unit(population)
        return [_auc(run, client_scores, how, of), _tpr(run, client_scores, how, of)]


def final_models(run: Run, population: Partitioned) -> dict[ClientId, Params]:
    """The final models in the run directory: by client if each has its own, else one under the key ""."""
    method: Any = run.experiment.method
    state = run.state(method.state_type)
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
) -> tuple[list[ClientScores], str]:
    """Scores by client, and the attack in words.

    Args:
        population: with the model at its start.
    """
    seed, pooled = run.experiment.run.seed, run.experiment.method.needs.pooled
    pool = RowPool(population, seed, pooled=pooled)
    clients = [c for c in pool.honest if c in models or "" in models]
    clients = [c for c in clients if len(pool.members[c]) and len(pool.strangers[c])]
    if not clients:
        return [], ""
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
    target = {c: _of(run, population, models.get(c) or models[""], pool, c) for c in clients}
    client_scores = []
    for c in clients:
        split = len(pool.members[c])
        if number and len(found[c]) == number:
            scores = log_ratio(target[c], np.stack(found[c]), np.stack(inside[c]))
        else:
            scores = by_class(target[c], pool.labels(c))
        client_scores.append(ClientScores(c, scores[:split], scores[split:]))
    each = "" if pool.labels(clients[0]) is None else ", with a threshold a class"
    if population.trains_on_blocks:
        each = ", with one threshold for whole blocks and one for shorter ones"
    return client_scores, f"the likelihood ratio over {number} shadow runs" if number else f"the loss{each}"


def _of(run: Run, population: Partitioned, w: Params, pool: RowPool, client: ClientId) -> Array:
    return evidence(run.experiment.method, population.model, w, pool.compared_rows(client))


def _auc(run: Run, client_scores: Sequence[ClientScores], how: str, of: str) -> Finding:
    by_client = np.array([rates.auc(t.members, t.strangers) for t in client_scores])
    weights, strangers = np.array([len(t.members) for t in client_scores]), sum(len(t.strangers) for t in client_scores)

    def interval(confidence: float, z: float) -> tuple[float, float, float]:
        rng = seeds.generator(run.experiment.run.seed, "audit", "model membership", str(confidence))
        return rates.auc_interval(by_client, weights, strangers, rng, confidence, z)

    mean, low, high = interval(0.95, Z)
    detail: dict[str, Any] = {"attack": how, "clients": len(client_scores), "members": int(weights.sum())}
    detail |= {"strangers": strangers, "highest_of_a_client": float(by_client.max())}
    says = f"By {how}, a training row scores above a test row with chance {mean:.3f} [{low:.3f}, {high:.3f}]; 0.5 is "
    says += "guessing"
    contradicts, rule = False, ABOVE
    if (promise := stated_guarantee(run)) is not None:
        epsilon, delta = promise
        # A training row and a test row differ by an exchange: one out, one in.
        allowed = largest_auc(2 * epsilon, min(delta * (1 + math.exp(min(epsilon, 700.0))), 1.0))
        detail["allowed_by_epsilon"] = allowed
        strict = interval(STRICT, Z_STRICT)[1]
        contradicts, rule = strict > allowed, limit_rule(ABOVE, allowed, strict, STRICT)
        says += f", and epsilon = {epsilon:.4g} allows {allowed:.3f}"
    return Finding("model_membership", QUESTION, mean, low, high, NOTABLE, rule, f"{says}.{of}", contradicts, detail)


def _tpr(run: Run, client_scores: Sequence[ClientScores], how: str, of: str) -> Finding:
    name, rng = "model_membership_tpr", seeds.generator(run.experiment.run.seed, "audit", "model membership tpr")
    r = rates.tpr_at([(t.members, t.strangers) for t in client_scores], ALARMS, rng)
    if r is None:
        return nothing(name, QUESTION_TPR, f"No client has {rates.FEW} test rows.")
    says = (
        f"By {how}, {100 * r.tpr:.1f} % of the training rows [{100 * r.low:.1f}, {100 * r.high:.1f}] are above a "
        f"threshold that {100 * r.alarms / r.negatives:.1f} % of {r.negatives} test rows exceed; guessing gives 1 %, "
        f"the bound is {100 * NOTABLE_TPR:.0f} %.{of}"
    )
    detail = {"hits": r.hits, "members": r.positives, "false_alarms": r.alarms, "strangers": r.negatives}
    return Finding(name, QUESTION_TPR, r.tpr, r.low, r.high, NOTABLE_TPR, ABOVE, says, False, detail)


def stated_guarantee(run: Run) -> tuple[float, float] | None:
    """(epsilon, delta) that the run states for its model, by row or by client; None if it states none."""
    epsilon = run.manifest["result"].get("epsilon")
    deltas = [float(e["delta"]) for e in run.manifest["ledger"]["entries"] if e.get("delta") is not None]
    return None if epsilon is None or not deltas else (float(epsilon), max(deltas))
