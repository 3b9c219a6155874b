"""A watch of a replay that measures by how much each update lowered the loss of single rows.

The drop is the loss at the start of an update minus the loss at its end, and costs two forward passes. Nasr, Shokri and
Houmansadr (IEEE S&P 2019, arXiv:1812.00910) use the inner product of an update with the negative gradient of the row's
loss, which approximates the drop to first order. A difficult row has a large loss in both models, so the drop does not
depend on the row's difficulty. Watson et al. (arXiv:2111.08440) use a reference model for this purpose. Here the
reference is the model from which the update starts, and all clients have trained that model.
"""

from __future__ import annotations

import numpy as np

from fedfm.audits.crossed import crossings, sees_sums_only
from fedfm.audits.inference.rates import Array
from fedfm.audits.recorded_run import Turn
from fedfm.audits.replay import Watch
from fedfm.audits.row_evidence import evidence, losses
from fedfm.audits.shadow_runs import RowPool
from fedfm.core.client import ClientId
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run

NO_UPDATE = (
    "No update is a change of the complete model, so this method's messages give no model that could score rows."
)


class LossDrops(Watch):
    """A watch that sums the drops of each row's loss over the rounds.

    Attributes:
        found: for each client the drops (n,) of its members and strangers (see
            :class:`~fedfm.audits.shadow_runs.RowPool`).
        updates: number of updates that were read; a sum counts as one.
        sums: whether the server only sees the sum of a round's updates.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.pool: RowPool | None = None
        self.found: dict[ClientId, Array] = {}
        self.updates, self.sums = 0, sees_sums_only(run)

    def see(self, turn: Turn, population: Partitioned) -> None:
        if self.pool is None:
            self.pool = RowPool(population, self._run.experiment.run.seed)
        method = self._run.experiment.method
        model, pool = population.model, self.pool
        before = model.params()
        labelled = pool.population.federated.table.labels is not None and not model.is_language_model
        try:
            for crossing in crossings(turn, method, model, sums=self.sums):
                self.updates += 1
                for client in crossing.clients:
                    rows = pool.compared_rows(client)
                    start, end = (evidence(method, model, w, rows) for w in (crossing.start, crossing.end))
                    drop = losses(start, labelled) - losses(end, labelled)
                    self.found[client] = self.found.get(client, np.zeros(len(drop))) + drop
        finally:
            model.load(before)  # so that later rounds are the same as in the run
