"""Membership inference on the clients' updates: what a server that follows the protocol learns about single rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from fedfm import seeds
from fedfm.audits.audit import Audit
from fedfm.audits.finding import Finding, nothing
from fedfm.audits.loss_drops import LossDrops
from fedfm.audits.member_scores import Cell, MemberScores
from fedfm.audits.replay import Replay
from fedfm.audits.row_evidence import by_class, no_round, unreadable
from fedfm.audits.shadow_runs import RowPool, unit
from fedfm.audits.stated_epsilon import claim
from fedfm.runtime.run_directory import Run
from fedfm.training import TrainsLocally

QUESTION = "Can the server tell from the updates which rows a client trained on?"
NO_UPDATE = "No update was a change of the whole model: what the server gets of this method cannot be scored on rows."


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
        drops = replay.watch(LossDrops)
        if not drops.updates:
            return [nothing("update_membership", QUESTION, NO_UPDATE)]
        run, pool = replay.run, drops.pool
        assert pool is not None  # noqa: S101 - made with the first update
        cells = list[Cell]()
        for client in pool.honest:
            split = len(pool.members[client])
            if client in drops.found and split and len(pool.strangers[client]):
                scores = by_class(drops.found[client], pool.labels(client))
                cells.append(Cell(scores[:split], scores[split:]))
        if not cells:
            return [nothing("update_membership", QUESTION, "There are no test rows to compare with.")]
        return [_finding(run, cells, drops, pool)]


def reads_updates(run: Run) -> bool:
    """Whether clients of this run send what a client optimiser trained."""
    method: Any = run.experiment.method
    return unreadable(run) is None and isinstance(method, TrainsLocally) and not run.experiment.method.needs.pooled


def _finding(run: Run, cells: list[Cell], drops: LossDrops, pool: RowPool) -> Finding:
    seed = run.experiment.run.seed
    scores = MemberScores.of_clients(
        cells, lambda confidence: seeds.generator(seed, "audit", "update membership", str(confidence))
    )
    of = "" if pool.population.model.is_language_model else " of its class"
    what = "the sums that it saw" if drops.sums else "the client's own updates"
    says = f"In {drops.updates} updates, {what} lowered the loss of a training row more than that of a test row{of}"
    detail: dict[str, Any] = {"updates": drops.updates, "sums_only": drops.sums, **scores.counts()}
    detail["highest_of_a_client"] = float(scores.aucs.max())
    if (rate := scores.rate(seeds.generator(seed, "audit", "update membership tpr"))) is not None:
        detail |= {"tpr_at_1_percent": rate.tpr, "tpr_low": rate.low, "tpr_high": rate.high}
    promise = claim(run)
    if promise is not None:  # a training row and a test row differ by an exchange
        promise = replace(promise, steps=max(promise.steps, 2))
    return scores.finding("update_membership", QUESTION, says, detail, claim=promise, unit=unit(pool.population))
