"""Test the sensitivity that DP-SGD assumes: the largest effect of a single row on the sum of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np

from fedfm import seeds
from fedfm.aggregation._record_level import DpSgd
from fedfm.audits.audit import Audit
from fedfm.audits.finding import COUNT, Finding, absorb_rounding, nothing
from fedfm.audits.replay import Replay
from fedfm.audits.row_canaries import NO_ROW_NOISE, costliest
from fedfm.linalg.threads import torch_threads
from fedfm.runtime.result_match import final_state
from fedfm.runtime.run_directory import Run
from fedfm.training import private

QUESTION = "Does a row move the sum of a step by more than clip_norm?"
ROWS = 16  # number of rows that are measured; they form one batch


class RowNorms(Audit):
    """Measures the sum with a row minus the sum without the row, for the models at the run's start and at its end."""

    replays: ClassVar[bool] = False

    def reads(self, run: Run) -> bool:
        return isinstance(run.experiment.aggregation.mechanism, DpSgd)

    def why_unread(self, run: Run) -> str:
        return NO_ROW_NOISE

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        run, population = replay.run, replay.population
        mechanism = cast(DpSgd, run.experiment.aggregation.mechanism)  # reads() checks this
        client, method, model = costliest(population, mechanism), run.experiment.method, population.model
        if client is None:
            return [nothing("row_norms", QUESTION, "No client has training rows.")]
        rows = population.data(client).train
        batch = seeds.generator(run.experiment.run.seed, "audit", "row norms").permutation(len(rows))[:ROWS]
        c = mechanism.plan.clip_norm
        places = [model.params()]
        last = method.params_for(final_state(run, method.state_type), client)
        if last.layout is model.layout or tuple(last) == model.names:
            places.append(last)
        longest = 0.0
        with torch_threads(1):
            for w in places:
                model.load(w)
                total_of = private.sums(model, rows, c, ROWS)
                total = total_of(batch)
                moves = (float((total - total_of(np.delete(batch, i))).norm()) for i in range(len(batch)))
                longest = max(longest, *moves)
            model.load(places[0])
        share = absorb_rounding(longest / c, 1.0)
        contradicts = share > 1.0
        says = (
            f"Among {len(batch)} rows of a client, the one with the largest effect moves a step's sum by {share:.4g} "
            "times clip_norm, at the start or at the end of the run"
            + (
                "; the noise is calibrated for at most 1 times clip_norm: epsilon is larger than stated."
                if contradicts
                else "; the noise is calibrated for at most 1 times clip_norm."
            )
        )
        detail = {"rows": len(batch), "models": len(places), "clip_norm": c}
        return [Finding("row_norms", QUESTION, share, None, None, 1.0, COUNT, says, contradicts, detail)]
