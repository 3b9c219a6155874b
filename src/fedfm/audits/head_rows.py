"""Compute features of rows from a client's updates of the head, by the closed form x = dW / db."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedfm.audits.crossed import crossings
from fedfm.audits.finding import Finding, VerdictRule, nothing
from fedfm.audits.head_view import HeadAudit, changes, head_names
from fedfm.audits.inference import copies, rates
from fedfm.audits.inference.copies import NAMED, SHARE
from fedfm.audits.inference.head_updates import features
from fedfm.audits.inference.rates import Array
from fedfm.audits.recorded_run import Turn
from fedfm.audits.replay import Replay, Watch
from fedfm.audits.shadow_runs import RowPool
from fedfm.core.client import ClientId
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.predictions import apply_model
from fedfm.runtime.run_directory import Run

QUESTION = "Do a client's updates of the head disclose the features of single rows?"
BY_CHANCE = VerdictRule(("low > bound",), ("estimate <= bound",))
NO_BIAS = (
    "clients train a head without a bias. A row with features x changes the weights of class c by (y_c - p_c) x and "
    "the bias by y_c - p_c, and their quotient is x. Without the bias, x is known only up to an unknown factor, and if "
    "there are several rows, any mixture of their features explains the change as well"
)


class Rebuilt(Watch):
    """A watch that finds the rows whose features the updates disclose.

    Attributes:
        hits: (client, row of the table) for each row that an update discloses.
        by_chance: test rows that an update seems to disclose, although no update can contain them.
        ratios: for each computed feature vector, its distance to the nearest training row, divided by the typical
            distance between neighbours.
        rows: number of training rows of the clients that trained.
        compared: number of their test rows, with which the computed features were compared.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pool: RowPool | None = None
        self.hits: set[tuple[ClientId, int]] = set()
        self.by_chance: set[int] = set()
        self.ratios: list[float] = []
        self._trained: set[ClientId] = set()
        self.compared, self.rows, self.updates = 0, 0, 0
        self.why = "the server saw no single client's update of a complete model"  # if nothing is found

    def see(self, turn: Turn, population: Partitioned) -> None:
        method = self._run.experiment.method
        model, names = population.model, head_names(population.model)
        if names is None or names.bias is None:
            self.why = NO_BIAS if names is not None else "no client trains a linear head of the model"
            return
        if turn.round == 0:
            return
        pool = self._pool = self._pool or RowPool(population, self._run.experiment.run.seed)
        honest = set(pool.honest)
        before = model.params()
        for crossing in crossings(turn, method, model):
            (client,) = crossing.clients
            moved = changes(crossing, names)
            if client not in honest:
                continue
            self._trained.add(client)
            if moved is None:
                continue
            self.updates += 1
            _, x = features(*moved)
            with apply_model(method, model, crossing.start, pool.compared_rows(client)) as rows:
                known: Array = model.features(rows).double().numpy()
            self._compare(client, x, known, pool)
        self.rows = sum(len(pool.members[c]) for c in self._trained)
        self.compared = len(np.unique(np.concatenate([np.zeros(0), *(pool.strangers[c] for c in self._trained)])))
        model.load(before)  # so that later rounds are the same as in the run

    def _compare(self, client: ClientId, x: Array, known: Array, pool: RowPool) -> None:
        split, gap = len(pool.members[client]), copies.typical_gap(known)
        if not split or not gap or not len(x):
            return
        index, near = copies.nearest(x, known[:split])
        self.ratios += (near / gap).tolist()
        self.hits |= {(client, int(pool.members[client][i])) for i in index[near < SHARE * gap]}
        index, near = copies.nearest(x, known[split:])
        self.by_chance |= {int(pool.strangers[client][i]) for i in index[near < SHARE * gap]}


class HeadRows(HeadAudit):
    """Finds the fraction of training rows whose features an update discloses.

    No update contains test rows, so the fraction of test rows that updates seem to disclose shows the effect of chance.
    """

    def watch(self, run: Run) -> Rebuilt:
        return Rebuilt(run)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        found = replay.watch(Rebuilt)
        if not found.ratios:
            return [nothing("head_rows", QUESTION, f"Not measured: {found.why}.")]
        hits, rows = len(found.hits), max(found.rows, 1)
        low, high = rates.clopper_pearson(hits, rows)
        chance = len(found.by_chance) / found.compared if found.compared else 0.0
        says = (
            f"dW / db of {found.updates} updates gives the features of {hits} of {rows} training rows, and of "
            f"{100 * chance:.1f} % of the test rows, which no update contains. The median distance of computed "
            f"features to training rows is {float(np.median(found.ratios)):.2g} times that of neighbouring rows."
        )
        named = [{"client": c, "row": row} for c, row in sorted(found.hits)[:NAMED]]
        detail = {"updates": found.updates, "rows": rows, "rebuilt": hits, "by_chance": chance, "leaks": named}
        detail |= {"nearest_ratio": min(found.ratios), "median_ratio": float(np.median(found.ratios))}
        return [Finding("head_rows", QUESTION, hits / rows, low, high, chance, BY_CHANCE, says, False, detail)]
