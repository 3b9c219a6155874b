"""Test the epsilon of a FedPFT run. The attacker knows everything except which row of each pair was used."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from fedfm.audits.audit import Audit
from fedfm.audits.fedpft_view import SentClass, View
from fedfm.audits.finding import CLAIM, Finding, absorb_rounding, nothing, refutes
from fedfm.audits.inference.one_run import epsilon_bound, readings
from fedfm.audits.inference.rates import Array
from fedfm.audits.replay import Replay
from fedfm.audits.stated_epsilon import claim, finding_on_claim
from fedfm.methods.fedpft.fedpft import FedPFT
from fedfm.runtime.run_directory import Run

QUESTION = "Do the messages disclose more about single rows than the stated epsilon allows?"
CONFIDENCE = 0.99  # confidence of a refutation; high, because audits are repeated
ROUNDING = 2.0**-11  # relative rounding error of float16; in a sum without noise it takes the place of the noise


class Epsilon(Audit):
    """Pairs training rows with rows that no client trained on, and guesses for each pair which row was used.

    The audit assumes that test rows of a class have the same distribution as the class's training rows.
    """

    methods: ClassVar[tuple[str, ...]] = ("fedpft",)

    def unfit(self, run: Run) -> str | None:
        if claim(run) is None:
            return "the manifest of this run claims no epsilon"
        method = run.experiment.method_as(FedPFT)
        return None if method.topology == "star" else "in a chain a sum contains other clients' rows, too"

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        view, promise = View(replay), claim(replay.run)
        assert promise is not None  # noqa: S101 - unfit() says so
        found = [_read(view, *pairs) for pairs in _pairs(view)]
        if not found:
            return [nothing("epsilon", QUESTION, "No class has both training rows and rows that nobody trained on.")]
        coins = np.concatenate(found)
        right = int((coins > 0).sum())
        low = absorb_rounding(epsilon_bound(coins.tolist(), promise.delta, CONFIDENCE, promise.steps), promise.epsilon)
        odds = math.log((right + 0.5) / (len(coins) - right + 0.5)) / promise.steps
        says = (
            f"An attacker that knows everything else finds the used row in {right} of {len(coins)} pairs. This "
            f"{refutes(low)} at {100 * CONFIDENCE:.0f} % confidence."
        )
        detail = {"pairs": len(coins), "right": right, "confidence": CONFIDENCE, "delta": promise.delta}
        detail |= {"steps_between_the_rows_of_a_pair": promise.steps}
        figures = max(odds, 0.0), low, None
        return [finding_on_claim("epsilon", QUESTION, figures, promise.epsilon, CLAIM, says, detail)]


def _pairs(view: View) -> Iterator[tuple[SentClass, Array, Array]]:
    """For each class of a client, yield (class, rows, partners that nobody trained on); no row is in two pairs."""
    pools: dict[tuple[int, bytes], list[SentClass]] = defaultdict(list)
    for cell in view.cells:
        pools[cell.label, view.held_out(cell.client, cell.label).tobytes()].append(cell)
    for (label, strangers), cells in pools.items():
        rng = view.rng("pairs", label, cells[0].client)
        partners = rng.permutation(np.frombuffer(strangers, dtype=np.int64))
        owners = np.concatenate([np.full(len(c.rows), i) for i, c in enumerate(cells)])
        chosen = rng.permutation(len(owners))[: len(partners)]
        rows = np.concatenate([c.rows for c in cells])
        for i, cell in enumerate(cells):
            mine = np.flatnonzero(owners[chosen] == i)
            if len(mine):
                yield cell, rows[chosen[mine]], partners[mine]


def _read(view: View, cell: SentClass, used: Array, unused: Array) -> Array:
    known = view.features(np.setdiff1d(cell.rows, used)).astype(np.float64).sum(0)
    x, y = (view.features(rows).astype(np.float64) for rows in (used, unused))
    sigma = cell.sigma or ROUNDING * cell.size * float(np.sqrt((x * x).mean()))
    return readings(cell.total, known, x, y, sigma)
