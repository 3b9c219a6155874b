"""Membership inference on the clients' updates: what a server that follows the protocol learns about single rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from fedfm import seeds
from fedfm.audits.audit import Audit
from fedfm.audits.finding import ABOVE, Finding, nothing
from fedfm.audits.inference import rates
from fedfm.audits.inference.one_run import largest_auc
from fedfm.audits.inference.rates import ALARMS, NOTABLE
from fedfm.audits.loss_drops import LossDrops
from fedfm.audits.replay import Replay
from fedfm.audits.row_evidence import by_class, no_round, unreadable
from fedfm.audits.shadow_runs import RowPool, unit
from fedfm.audits.stated_epsilon import claim, limit_rule
from fedfm.runtime.run_directory import Run
from fedfm.training import TrainsLocally

QUESTION = "Can the server tell from the updates which rows a client trained on?"
NO_UPDATE = "No update was a change of the whole model: what the server gets of this method cannot be scored on rows."
Z, STRICT, Z_STRICT = 1.959964, 0.9999, 3.890592


class UpdateMembership(Audit):
    """Compares training rows with test rows by how far their client's updates lowered their loss."""

    replies: ClassVar[bool] = False

    def reads(self, run: Run) -> bool:
        return reads_updates(run)

    def unfit(self, run: Run) -> str | None:
        return no_round(run)

    def watch(self, run: Run) -> LossDrops:
        return LossDrops(run)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        drops: Any = replay.watched["update_membership"]
        if not drops.updates:
            return [nothing("update_membership", QUESTION, NO_UPDATE)]
        run, pool = replay.run, drops.pool
        cells = []
        for client in pool.honest:
            split = len(pool.members[client])
            if client in drops.found and split and len(pool.strangers[client]):
                scores = by_class(drops.found[client], pool.labels(client))
                cells.append((scores[:split], scores[split:]))
        if not cells:
            return [nothing("update_membership", QUESTION, "There are no test rows to compare with.")]
        return [_finding(run, cells, drops, pool)]


def reads_updates(run: Run) -> bool:
    """Whether clients of this run send what a client optimiser trained."""
    method: Any = run.experiment.method
    return unreadable(run) is None and isinstance(method, TrainsLocally) and not run.experiment.method.needs.pooled


def _finding(run: Run, cells: list[Any], drops: LossDrops, pool: RowPool) -> Finding:
    by_client = np.array([rates.auc(*cell) for cell in cells])
    weights, strangers = np.array([len(members) for members, _ in cells]), sum(len(b) for _, b in cells)

    def interval(confidence: float, z: float) -> tuple[float, float, float]:
        rng = seeds.generator(run.experiment.run.seed, "audit", "update membership", str(confidence))
        return rates.auc_interval(by_client, weights, strangers, rng, confidence, z)

    mean, low, high = interval(0.95, Z)
    of = "" if pool.population.model.is_language_model else " of its class"
    what = "the sums that it saw" if drops.sums else "the client's own updates"
    says = (
        f"In {drops.updates} updates, {what} lowered the loss of a training row more than that of a test row{of} "
        f"with chance {mean:.3f} [{low:.3f}, {high:.3f}]; 0.5 is guessing"
    )
    detail: dict[str, Any] = {"updates": drops.updates, "sums_only": drops.sums, "clients": len(cells)}
    detail |= {"members": int(weights.sum()), "strangers": strangers, "highest_of_a_client": float(by_client.max())}
    rng = seeds.generator(run.experiment.run.seed, "audit", "update membership tpr")
    if (rate := rates.tpr_at(cells, ALARMS, rng)) is not None:
        detail |= {"tpr_at_1_percent": rate.tpr, "tpr_low": rate.low, "tpr_high": rate.high}
    contradicts, rule, promise = False, ABOVE, claim(run)
    if promise is not None:
        steps = max(promise.steps, 2)
        delta = min(promise.delta * (1 + math.exp(min(promise.epsilon, 700.0))), 1.0)
        allowed = largest_auc(steps * promise.epsilon, delta)
        detail["allowed_by_epsilon"] = allowed
        strict = interval(STRICT, Z_STRICT)[1]
        contradicts, rule = strict > allowed, limit_rule(ABOVE, allowed, strict, STRICT)
        says += f", and epsilon = {promise.epsilon:.4g} allows {allowed:.3f}"
    says += f".{unit(pool.population)}"
    return Finding("update_membership", QUESTION, mean, low, high, NOTABLE, rule, says, contradicts, detail)
