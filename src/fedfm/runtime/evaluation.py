"""How good the models of a run are: what clients are asked beside the method's own messages, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.capabilities import Applying, HidingCounts, Judge, Keeping, Predicting, Starting, has
from fedfm.core.client import Client, ClientId, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.errors import RunError
from fedfm.linalg.params import Params
from fedfm.models import metrics
from fedfm.runtime.population import Partitioned
from fedfm.runtime.predictions import check_own, kept, logits, own, personal, scores
from fedfm.runtime.run_directory import Run
from fedfm.training import packed

ANSWERS = ("rouge_1", "answers_cut")  # what an instruction model's scores tell beside the others'


class Evaluation:
    """What the run asks of clients beside the method's own messages; a silo's policy may refuse each."""

    def __init__(self, method: Method[Any]) -> None:
        self.method = method

    @on_client(kind="scores")
    def evaluate(self, client: Client, w: Params, part: str) -> dict[str, Any]:
        """The client's own model on its own ``test`` or ``val`` rows (see ``models.metrics.evaluate``)."""
        return scores(self.method, client.model, own(self.method, client, w), _rows(client, part))

    @on_client(kind="scores")
    def evaluate_start(self, client: Client, w: Params, part: str) -> dict[str, Any]:
        """As :meth:`evaluate`, of what the client's last local pass started from."""
        start = self.method.start_of(client, w) if has(self.method, Keeping) else w
        return scores(self.method, client.model, start, _rows(client, part))

    @on_client(kind="reveal")
    def reveal(self, client: Client, w: Params) -> Params:
        """The client's own model, for the run's directory."""
        return own(self.method, client, w)


def _rows(client: Client, part: str) -> Rows:
    return client.data.test if part == "test" else client.data.val


class Evaluator:
    """The server's half: asks clients, judges on its own rows, and says both as one line of metrics.

    Args:
        judge: metrics of one model on the global test rows (see ``models.metrics.evaluate``); None where the server
            has no test rows.
    """

    def __init__(self, run: Run, fed: Federation, judge: Judge | None) -> None:
        self._run, self._fed, self.judge = run, fed, judge
        self._method: Method[Any] = run.experiment.method
        self._clients = Evaluation(self._method)
        self._revealed: tuple[Any, dict[ClientId, Params]] | None = None

    def models(self, state: Any) -> dict[ClientId, Params]:
        """What the server has of the final models: one by client name for personal methods, else one under ""."""
        if personal(self._method):
            return {client: self._method.params_for(state, client) for client in self._fed.clients}
        return {"": self._method.params_for(state, "")}

    def revealed(self, state: Any) -> dict[ClientId, Params]:
        """The final models themselves. What clients keep of theirs is asked for; who refuses is left out."""
        models = self.models(state)
        if not kept(self._method):
            return models
        if self._revealed is None or self._revealed[0] is not state:
            check = partial(check_own, self._method, model=self._fed.model)
            self._revealed = state, self._aside(self._clients.reveal, check=check, w=each(models))
        return self._revealed[1]

    def scores(self, state: Any, thorough: bool) -> dict[str, Any]:
        """Metrics of the state: every client on its own test rows, the server's model (or models) on the global
        ones.
        """
        models = self.models(state)
        by_client = {client: models.get(client) or models[""] for client in self._fed.clients}
        judged_own = self._own(by_client, "test")
        own = {c: m.get("accuracy") for c, m in judged_own.items()}
        local = _mean(own.values())
        line: dict[str, Any] = {"client_accuracy": own, "local_accuracy": local}
        line["local_loss"] = _mean(m.get("loss") for m in judged_own.values())
        if local is None and line["local_loss"] is not None:  # of language models nothing else tells clients apart
            line["client_loss"] = {c: m.get("loss") for c, m in judged_own.items()}
        for key in ANSWERS:
            if any(key in m for m in judged_own.values()):
                line[f"local_{key}"] = _mean(m.get(key) for m in judged_own.values())
        if self._validates:
            judged = [m for m in self._own(by_client, "val").values() if m.get("loss") is not None]
            rows = sum(m["n"] for m in judged)
            line["val_loss"] = sum(m["n"] * m["loss"] for m in judged) / rows if rows else None
        if self.judge is not None and (thorough or not personal(self._method)):
            judged = [self.judge(w) for w in self.revealed(state).values()]
            line["global_accuracy"] = _mean(m["accuracy"] for m in judged)
            for key in ("loss", "balanced_accuracy", "macro_f1", "perplexity"):
                line[key] = _mean(m.get(key) for m in judged)
            for key in ("attack_success", *ANSWERS):
                if any(key in m for m in judged):
                    line[key] = _mean(m.get(key) for m in judged)
        if thorough and has(self._method, Starting):
            found = self._own(self._method.start_models(state), "test", self._clients.evaluate_start)
            before = {c: m.get("accuracy") for c, m in found.items()}
            line |= {"server_accuracy": _mean(before.values()), "server_client_accuracy": before}
            line["server_loss"] = _mean(m.get("loss") for m in found.values())
            if "client_loss" in line:
                line["server_client_loss"] = {c: m.get("loss") for c, m in found.items()}
        line["accuracy"] = local if personal(self._method) else line.get("global_accuracy", local)
        return line

    @property
    def _validates(self) -> bool:
        """Clients hold validation rows, and may be asked for scores."""
        if self._run.experiment.privacy is not None:
            return False
        split = self._run.manifest["split"]
        if split is None:  # silos with files of their own: only they know, and who has none says so
            return self._run.experiment.data.val_fraction > 0
        return any(counts["val"]["rows"] for counts in split["clients"].values())

    def _own(
        self, models: Mapping[ClientId, Params], part: str, handler: Callable[..., Any] | None = None
    ) -> dict[ClientId, dict[str, Any]]:
        """Metrics of each client's model on its own rows; {} where it did not answer, where the method hides how many
        rows a client has, and under [privacy], where exact scores and numbers of rows would leave beside what the
        ledger accounts for.
        """
        hidden = has(self._method, HidingCounts) and self._method.hides_counts
        unable = self._method.needs.model == "server"
        if self._run.experiment.privacy is not None or hidden or unable:
            return {client: {} for client in self._fed.clients}
        first = next(iter(models.values()))
        payload: Any = first if all(w is first for w in models.values()) else each(models)
        replies = self._aside(handler or self._clients.evaluate, w=payload, part=part)
        return {client: replies.get(client, {}) for client in self._fed.clients}

    def _aside(self, handler: Callable[..., Any], **payload: Any) -> dict[ClientId, Any]:
        """Ask what is no part of the method: not counted, and nobody is left out for it."""
        excluded, cohort = list(self._fed.excluded), self._fed.cohort
        try:
            replies = self._fed.ask(handler, counted=False, **payload)
        except RunError:  # nobody answered; the training goes on
            replies = {}
        self._fed.excluded, self._fed.cohort = excluded, cohort
        return replies


def _mean(values: Any) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def judge(
    population: Partitioned, method: Method[Any], ask: Callable[[Params], Mapping[ClientId, Tensor]] | None = None
) -> Judge | None:
    """Metrics of a method's parameters on the global test rows; None where there are none.

    Where logits are kept (see :mod:`fedfm.training.packed.predictor`) the rows are judged in the clients' pieces: a
    process that has judged its clients with the same parameters has the logits already, with the same bits.

    Args:
        ask: gives logits of pieces from where they are; a piece that it leaves out is computed here.
    """
    if not len(population.federated.test):
        return None

    def whole(w: Params) -> dict[str, Any]:
        return scores(method, population.model, w, population.test)

    def assembled(w: Params) -> dict[str, Any]:
        known = ask(w) if ask is not None else {}
        pieces = population.pieces
        parts = [known[c] if c in known else logits(method, population.model, w, population.piece(c)) for c in pieces]
        index = np.concatenate([population.federated.test[:0], *pieces.values()])
        return metrics.scores(torch.cat(parts), population.labels(index))

    judged = assembled if by_pieces(population, method) else whole

    def with_attack(w: Params) -> dict[str, Any]:
        found = judged(w)
        attackers, triggered = population.attackers, population.triggered
        if attackers is not None and triggered is not None:
            target = attackers.attack.target_of(population.federated.table.classes)
            said = logits(method, population.model, w, triggered)
            found = {**found, "attack_success": float((said.argmax(-1) == target).float().mean())}
        return found

    return judged if population.attackers is None else with_attack


def by_pieces(population: Partitioned, method: Method[Any]) -> bool:
    """Whether :func:`judge` asks piece by piece: the model keeps logits, and they are all that the method judges by."""
    plain = not (has(method, Predicting) or has(method, Applying))
    plain = plain and population.client_model is not None
    return plain and population.federated.table.labels is not None and packed.applies(population.model, "exact")
