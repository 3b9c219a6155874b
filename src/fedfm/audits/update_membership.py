"""Membership inference on clients' updates, by a server that follows the protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedfm import seeds
from fedfm.audits.crossed import UpdateAudit
from fedfm.audits.finding import Finding, nothing
from fedfm.audits.loss_drops import NO_UPDATE, LossDrops
from fedfm.audits.member_scores import CellScores, MemberScores
from fedfm.audits.replay import Replay
from fedfm.audits.row_evidence import by_class
from fedfm.audits.shadow_runs import RowPool, unit
from fedfm.audits.stated_epsilon import claim
from fedfm.runtime.run_directory import Run

QUESTION = "Can the server tell from the updates which rows a client trained on?"


class UpdateMembership(UpdateAudit):
    """Compares a client's training rows with test rows, by how much the client's updates lowered each row's loss."""

    def watch(self, run: Run) -> LossDrops:
        return LossDrops(run)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        drops = replay.watch(LossDrops)
        if not drops.updates:
            return [nothing("update_membership", QUESTION, NO_UPDATE)]
        run, pool = replay.run, drops.pool
        assert pool is not None  # noqa: S101 - the first update makes it
        cells = list[CellScores]()
        for client in pool.honest:
            split = len(pool.members[client])
            if client in drops.found and split and len(pool.strangers[client]):
                scores = by_class(drops.found[client], pool.labels(client))
                cells.append(CellScores(scores[:split], scores[split:]))
        if not cells:
            return [nothing("update_membership", QUESTION, "There are no test rows to compare with.")]
        return [_finding(run, cells, drops, pool)]


def _finding(run: Run, cells: list[CellScores], drops: LossDrops, pool: RowPool) -> Finding:
    seed = run.experiment.run.seed
    purpose = ("audit", "update membership")
    scores = MemberScores(cells, lambda level: seeds.generator(seed, *purpose, str(level)), digits=6)
    of = "" if pool.population.federated.table.labels is None else " of its class"
    what = "the sums that it saw" if drops.sums else "the client's own updates"
    says = f"In {drops.updates} updates, {what} lowered the loss of a training row more than the loss of a test row{of}"
    detail: dict[str, Any] = {"updates": drops.updates, "sums_only": drops.sums, **scores.of_clients()}
    detail["highest_of_a_client"] = float(scores.aucs.max())
    if (rate := scores.rate(seeds.generator(seed, "audit", "update membership tpr"))) is not None:
        detail |= {"tpr_at_1_percent": rate.tpr, "tpr_low": rate.low, "tpr_high": rate.high}
    promise = claim(run)
    if promise is not None:  # the attack exchanges one row for another, which takes two steps of the claim
        promise = replace(promise, steps=max(promise.steps, 2))
    return scores.finding("update_membership", QUESTION, says, detail, promise, unit=unit(pool.population))
