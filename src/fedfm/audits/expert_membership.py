"""Membership inference on FedMS's experts and FedPGP's prompts: does a row's loss reveal whether it was trained on?

Yeom, Giacomelli, Fredrikson, Jha. Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting. CSF 2018.
arXiv:1709.01604, Section 3: the attacker scores a row by the negative of its loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch.nn.functional as F

from fedfm import seeds
from fedfm.audits.audit import Audit
from fedfm.audits.finding import Finding, nothing
from fedfm.audits.inference.rates import Array
from fedfm.audits.member_scores import CellScores, MemberScores
from fedfm.audits.recorded_run import Turn
from fedfm.audits.replay import Replay, Watch
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.models.adapter_reading import load_adapter
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.predictions import logits
from fedfm.runtime.run_directory import Run

GLOBAL = "Does the global expert or prompt, which every client gets, disclose which rows it was trained on?"
OWN = "Does a client's own model, which the server gets unless the silo refuses, disclose which rows it was trained on?"


class LastState(Watch):
    """The server's state after the last round."""

    state: Any = None

    def see(self, turn: Turn, population: Partitioned) -> None:
        self.state = turn.after


class ExpertMembership(Audit):
    """Compares losses of a client's training rows and test rows, under the global model and the client's own model."""

    methods: ClassVar[tuple[str, ...]] = ("fedms", "fedpgp")
    replies: ClassVar[bool] = False

    def watch(self, run: Run) -> Watch:
        return LastState()

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        state = replay.watch(LastState).state
        clients, run = replay.population.clients, replay.run
        own = {c: load_adapter(replay.population.model, run.adapter(c)) for c in clients if run.adapter(c).exists()}
        shared = dict.fromkeys(clients, state if isinstance(state, Params) else state.W_g)
        return [
            self._finding(replay, "global_expert_membership", GLOBAL, shared),
            self._finding(replay, "own_mixture_membership", OWN, own),
        ]

    def _finding(self, replay: Replay, name: str, question: str, models: dict[str, Params]) -> Finding:
        cells = list[CellScores]()
        for client, w in models.items():
            data = replay.population.data(client)
            if len(data.train) and len(data.test):
                cells.append(CellScores(self._scores(replay, w, data.train), self._scores(replay, w, data.test)))
        if not cells:
            return nothing(name, question, "No client has training rows, test rows and a stored model.")
        seed = replay.run.experiment.run.seed
        scores = MemberScores(cells, lambda level: seeds.generator(seed, "audit", name), digits=2)
        says = "A training row has a lower loss than a test row of the same client"
        return scores.finding(name, question, says, scores.of_clients())

    def _scores(self, replay: Replay, w: Params, rows: Rows) -> Array:
        """The negative loss of each row."""
        outputs = logits(replay.run.experiment.method, replay.population.model, w, rows)
        scores: Array = -F.cross_entropy(outputs, rows.labels, reduction="none").numpy()  # type: ignore[arg-type]
        return scores
