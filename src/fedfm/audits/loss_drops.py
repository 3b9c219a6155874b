"""A watch of how far each update lowered the loss of single rows.

The loss at the start of an update less the loss at its end is the integral, along the update, of its inner product with
the negative gradient of the row's loss: what Nasr, Shokri, Houmansadr (IEEE S&P 2019, arXiv:1812.00910) read from an
update, without a first-order error, for two forward passes. The start removes the row's difficulty, as Watson et
al. (arXiv:2111.08440) do by a reference model: it was trained by all clients, and the update by one of them.
"""

from __future__ import annotations

import numpy as np

from fedfm.audits.crossed import crossings, sees_sums_only
from fedfm.audits.inference.rates import Array
from fedfm.audits.replay import Turn, Watch
from fedfm.audits.row_evidence import evidence, losses
from fedfm.audits.shadow_runs import RowPool
from fedfm.core.client import ClientId
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run

NO_UPDATE = "No update was a change of the whole model: what the server gets of this method cannot be scored on rows."


class LossDrops(Watch):
    """Sums over the rounds, by client.

    Attributes:
        found: (n,) by client, of its members and strangers (see :class:`~fedfm.audits.shadow_runs.RowPool`).
        updates: number of updates read, of one client or of a sum.
        sums: whether the server sees only the round's sum.
    """

    def __init__(self, run: Run, pool: RowPool | None = None) -> None:
        self._run, self.pool = run, pool
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
            model.load(before)  # later rounds are those of the run
