"""Audit of BlindFed's step 6, which returns the mean loss of encrypted predictions: does it reveal the labels?"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from fedfm.audits.audit import Audit
from fedfm.audits.finding import ABOVE, Finding, nothing
from fedfm.audits.inference.rates import clopper_pearson
from fedfm.audits.replay import Replay
from fedfm.encrypted.audits.block_states import largest_client
from fedfm.encrypted.audits.inference_loss_oracle import labels_by_loss
from fedfm.encrypted.blindfed import BlindFed
from fedfm.runtime.run_directory import Run

QUESTION = "Can a client that chooses its predictions learn the labels in the server's order from the loss?"
BATCH, BITS = 16, 20  # the paper's batch size; bits of an encrypted answer
LINE = 0.5


class LossLabels(Audit):
    """Computes a batch's labels from its mean losses, and counts the orders of the batch that remain possible."""

    methods: ClassVar[tuple[str, ...]] = ("blindfed",)
    replays: ClassVar[bool] = False

    def unfit(self, run: Run) -> str | None:
        method = run.experiment.method_as(BlindFed)
        if method.protocol != "permuted":
            return 'with protocol = "masked", labels never leave the client'
        return None

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        population = replay.population
        table = population.federated.table
        rows = population.federated.clients[largest_client(population)].train[:BATCH]
        if len(rows) < 2 or table.labels is None or len(table.classes) < 2:
            return [nothing("labels.by_loss", QUESTION, "The client needs two labelled rows of different classes.")]
        truth = np.random.default_rng(replay.run.experiment.run.seed).permutation(np.asarray(table.labels)[rows])

        def loss(chosen: np.ndarray) -> float:
            exact = float(chosen[np.arange(len(truth)), truth].mean())
            step = chosen.max() / len(truth) / 2**BITS  # the answer is rounded to a multiple of this step
            return round(exact / step) * step if step else exact

        guess, queries = labels_by_loss(loss, len(truth), len(table.classes), BITS)
        hits = int((guess == truth).sum())
        low, high = clopper_pearson(hits, len(truth))
        counts = np.bincount(truth)
        left = sum(math.lgamma(c + 1) for c in counts) / math.log(2)
        complete = math.lgamma(len(truth) + 1) / math.log(2)
        says = (
            f"{hits} of {len(truth)} labels are read from {queries} losses of {BITS} bits. This leaves 2^{left:.0f} of "
            f"2^{complete:.0f} orders of the batch."
        )
        share = hits / len(truth)
        return [
            Finding("labels.by_loss", QUESTION, share, low, high, LINE, ABOVE, says, False,
                    {"queries": queries, "bits": BITS})
        ]  # fmt: skip
