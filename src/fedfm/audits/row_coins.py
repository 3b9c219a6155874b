"""A lower bound on epsilon from one run whose rows are all canaries.

Steinke, Nasr, Jagielski: Privacy auditing with one (1) training run. NeurIPS 2023. arXiv:2305.08846, Algorithm 1. The
run is repeated with a fair coin for each row, which decides whether the client has the row. The server guesses the
coins from the updates. If the run states no epsilon, the bound says which epsilons are too small to be true of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from fedfm.audits.crossed import UpdateAudit
from fedfm.audits.finding import Finding, VerdictRule, nothing, refutes, twice
from fedfm.audits.inference.one_run import SHARES, epsilon_bound
from fedfm.audits.inference.rates import Array
from fedfm.audits.loss_drops import NO_UPDATE, LossDrops
from fedfm.audits.replay import Replay
from fedfm.audits.row_evidence import by_class
from fedfm.audits.shadow_runs import BUDGET, Half, RowPool, cost, shadow_turns, unit
from fedfm.audits.stated_epsilon import STRICT, claim, finding_on_claim, lower_bounds
from fedfm.linalg.threads import torch_threads
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run

QUESTION = "Which epsilons for single rows do the updates of such a run refute?"
DELTA = 1e-5  # delta, if the run states none
FIRST = 1000  # number of the shadow run, from which its seed derives; model_membership uses smaller numbers


class RowCoins(UpdateAudit):
    """Guesses every row's coin by how much the updates lowered the row's loss."""

    replays: ClassVar[bool] = False

    def seconds(self, run: Run, population: Partitioned) -> float:
        again = cost(run, population)
        return max(again, 1.0) if again <= BUDGET else 1.0

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        run = replay.run
        population = replay.fresh()
        if (seconds := cost(run, population)) > BUDGET:
            why = f"To repeat the run with a coin for each row takes about {seconds:.0f} s, more than {BUDGET:.0f} s."
            return [nothing("row_coins", QUESTION, why)]
        pool = RowPool(population, run.experiment.run.seed)
        half, drops = Half(pool, FIRST, run.experiment.run.seed), LossDrops(run, pool)
        with torch_threads(1):
            for turn in shadow_turns(run, half, FIRST):
                drops.see(turn, population)
        if not drops.updates:
            return [nothing("row_coins", QUESTION, NO_UPDATE)]
        right: Array = np.concatenate(
            [
                by_class(drops.found[c], pool.labels(c)) * np.where(half.taken[c][1], 1.0, -1.0)
                for c in pool.honest
                if c in drops.found
            ]
        )
        return [_finding(run, right, drops, unit(population))]


def _finding(run: Run, right: Array, drops: LossDrops, of: str) -> Finding:
    """The finding, from readings (m,) that are positive where the guess is right."""
    promise = claim(run)
    delta, line = (DELTA, 0.0) if promise is None else (promise.delta, promise.epsilon)
    low, strict = lower_bounds(lambda level: epsilon_bound(right.tolist(), delta, level), line)
    order = np.argsort(-np.abs(right), kind="stable")
    odds = []
    for guesses in sorted({max(1, round(share * len(right))) for share in SHARES}):
        hits = int((right[order[:guesses]] > 0).sum())
        odds.append((math.log((hits + 0.5) / (guesses - hits + 0.5)), hits, guesses))
    estimate, hits, guesses = max(odds)
    says = (
        f"The server guesses {hits} of the {guesses} surest of {len(right)} coins right from "
        f"{'sums of updates' if drops.sums else 'single updates'}: this {refutes(low, ' of a row')} "
        f"at 95 % confidence, with delta = {delta:.2g}."
    )
    detail = {"coins": len(right), "sure": guesses, "right": hits, "delta": delta}
    estimate = max(estimate, 0.0)
    if promise is not None and promise.steps > 1:
        rule = twice(strict, STRICT)
        found = finding_on_claim("row_coins", QUESTION, (estimate, low, None), line, rule, says, detail)
        return replace(found, says=found.says + of)
    if promise is None:
        rule = VerdictRule(("low > bound",), (), "the run claims no epsilon")
        says += " The run claims none."
    else:
        rule = VerdictRule((), (), "a coin adds or removes a row, and the claim is about exchanged rows")
        says += f" The manifest claims {line:.4g} for exchanged rows, which says nothing about added or removed rows."
    return Finding("row_coins", QUESTION, estimate, low, None, line, rule, says + of, False, detail)
