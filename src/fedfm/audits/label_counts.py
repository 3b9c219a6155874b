"""Compute each client's label counts from the first update of its head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm import seeds
from fedfm.audits.crossed import CrossedUpdate, crossings
from fedfm.audits.finding import BELOW, Finding, interval, nothing, plural
from fedfm.audits.head_view import HeadAudit, Names, head_names
from fedfm.audits.inference import rates
from fedfm.audits.inference.head_updates import class_means, distance, guesses, label_shares, traces
from fedfm.audits.inference.rates import Array
from fedfm.audits.recorded_run import Turn
from fedfm.audits.replay import Replay, Watch
from fedfm.audits.shadow_runs import BUDGET, cost, honest_clients, trainings
from fedfm.core.capabilities import Predictor, has
from fedfm.core.client import Client, ClientData, ClientId
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.predictions import apply_model, logits
from fedfm.runtime.run_directory import Run
from fedfm.training import TrainsLocally
from fedfm.training.scheduler import train_client

QUESTION = "Can the server tell from a client's update how many rows of each class it has?"
OWN = 300  # number of the attacker's own rows, which are test rows at the server
MOST, LEAST = 150, 30  # largest and smallest number of local trainings that the attacker tries for each client


class Shares(Watch):
    """A watch that attacks each client's first update.

    Attributes:
        found: for each client, the estimated fractions of the labels (C,).
        public: (C,): fractions of the labels in the attacker's own rows; empty if it has no rows.
        tried: number of local trainings that the attacker tried for each client.
        bias: whether the clients' head has a bias.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.found: dict[ClientId, Array] = {}
        self.public: Array = np.zeros(0)
        self._passes: tuple[int, float, int] | None = None
        self.tried, self.bias = 0, True
        self.why = "the server saw no single client's update of a complete model"  # if nothing is found

    def see(self, turn: Turn, population: Partitioned) -> None:
        method: Any = self._run.experiment.method
        model, federated, names = population.model, population.federated, head_names(population.model)
        if names is None:
            self.why = "no client trains a linear head of the model"
            return
        if not len(federated.test):
            self.why = "the server has no rows of its own to train on"
            return
        if turn.round == 0:
            return
        fresh = [
            c
            for c in crossings(turn, method, model)
            if c.clients[0] not in self.found and c.start.layout is model.layout
        ]
        if not fresh:
            return
        self.bias = names.bias is not None
        self._passes = self._passes or passes(self._run, population)
        self.tried, one, clients = self._passes
        own = federated.test[:: -(-len(federated.test) // OWN)]
        labels = np.asarray(federated.table.labels)[own]
        self.public = np.bincount(labels, minlength=len(model.classes)) / len(labels)
        if self.tried < LEAST:
            self.why = (
                f"the attack repeats a client's local training at least {LEAST} times for each of {clients} clients "
                f"that trained, and one training takes about {one:.2g} s, so all take more than {BUDGET:.0f} s"
            )
            return
        before, attacker = model.params(), _Attacker(self._run, population, population.rows(own), labels, names)
        for crossing in fresh:
            (client,) = crossing.clients
            n = len(federated.clients[client].train)  # the attacker knows this number, which is the update's weight
            if n:
                self.found[client] = attacker.shares(crossing, n, self.tried)
        model.load(before)  # so that later rounds are the same as in the run


def passes(run: Run, population: Partitioned) -> tuple[int, float, int]:
    """(local trainings per client that fit the budget, seconds of one training, number of clients that trained)."""
    times = trainings(run, population.clients, int(run.manifest["result"]["rounds"]))
    one = cost(run, population) / max(times.total(), 1)
    return (min(MOST, int(BUDGET / (one * len(times)))) if one else MOST), one, len(times)


class _Attacker:
    """Repeats a client's training on the attacker's own rows, whose label counts it knows."""

    def __init__(self, run: Run, population: Partitioned, rows: Rows, labels: Array, names: Names) -> None:
        self._run, self._method, self._model = run, run.experiment.method, population.model
        self._rows, self._labels, self._names = rows, labels, names
        own_logits = has(self._method, Predictor, "logits")
        self._head_alone = not own_logits and {*population.model.live()} <= {*names}
        self._by_class = [np.flatnonzero(labels == c) for c in range(len(population.model.classes))]

    def shares(self, crossing: CrossedUpdate, n: int, number: int) -> Array:
        """Estimated fractions of the labels (C,) behind an update that was trained on n rows."""
        seed, client = self._run.experiment.run.seed, crossing.clients[0]
        rng = seeds.generator(seed, "audit", "label counts", client)
        local = self._run.experiment.method_as(TrainsLocally).local.plain
        with apply_model(self._method, self._model, crossing.start, self._rows) as rows:
            x = self._model.features(rows).double().numpy()
        means = class_means(x, self._labels, len(self._by_class))
        tried, behind = [], []
        for i, counts in enumerate(guesses(len(self._by_class), n, number, rng)):
            index = self._draw(counts, rng)
            mine = self._rows.take(index)
            none = mine.take([])
            data = ClientData(lambda mine=mine: mine, lambda none=none: none, lambda none=none: none)  # type: ignore[misc]
            end = local(
                Client("attacker", data, self._model, {}, seed=seeds.derive(seed, "audit", i), trainer=train_client),
                crossing.start,
            )
            tried.append(self._traces(end - crossing.start, end, means))
            behind.append(np.bincount(self._labels[index], minlength=len(self._by_class)) / n)
        observed = self._traces(crossing.end - crossing.start, crossing.end, means)
        return label_shares(np.stack(tried), np.stack(behind), observed)

    def _draw(self, counts: Array, rng: np.random.Generator) -> Array:
        """Draw rows with these label counts; if the attacker has no rows of a class, draw any rows for it."""
        every = np.arange(len(self._labels))
        return np.concatenate(
            [rng.choice(own if len(own) else every, k) for own, k in zip(self._by_class, counts, strict=True)]
        )

    def _traces(self, delta: Params, end: Params, means: Array) -> Array:
        probabilities = torch.softmax(self._logits(end).double(), -1).numpy()
        weight, bias = (None if name is None else delta[name].double().numpy() for name in self._names)
        return traces(weight, bias, means, self._labels, probabilities)  # type: ignore[arg-type]

    def _logits(self, w: Params) -> Tensor:
        if not self._head_alone:
            return logits(self._method, self._model, w, self._rows)
        with apply_model(self._method, self._model, w, self._rows) as rows:  # features, of which all fit in a batch
            return self._model.predict(rows, len(rows))


class LabelCounts(HeadAudit):
    """Measures the total variation distance between estimated and true fractions of the labels.

    This distance is compared with that of a guess: that every client has the fractions of the test rows.
    """

    def seconds(self, run: Run, population: Partitioned) -> float:
        tried, one, clients = passes(run, population)
        return tried * one * clients if tried >= LEAST else 1.0

    def watch(self, run: Run) -> Shares:
        return Shares(run)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        watch = replay.watch(Shares)
        federated = replay.population.federated
        honest = honest_clients(replay.population)
        error, guess, present = [], [], []
        for client, estimate in watch.found.items():
            if client not in honest:
                continue
            rows = np.asarray(federated.table.labels)[federated.clients[client].train]
            true = np.bincount(rows, minlength=len(watch.public)) / len(rows)
            error.append(distance(estimate, true))
            guess.append(distance(watch.public, true))
            present.append(float(((estimate * len(rows) >= 0.5) == (true > 0)).mean()))
        if not error:
            return [nothing("label_counts", QUESTION, f"Not measured: {watch.why}.")]
        return [_finding(replay, np.array(error), np.array(guess), float(np.mean(present)), watch)]


def _finding(replay: Replay, error: Array, guess: Array, present: float, watch: Shares) -> Finding:
    mean, baseline = float(error.mean()), float(guess.mean())
    low, high = rates.mean_interval(error)
    source = (
        "" if watch.bias else " (its head has no bias: only the change of its weights, and the predictions, are used)"
    )
    says = (
        f"Each client's first update{source}, and {watch.tried} local passes on the attacker's own rows, give label "
        f"shares that are {mean:.3f} {interval(low, high)} from the true ones (total variation, mean of "
        f"{plural(len(error), 'client')}); the guess that a client has the shares of the test rows errs by "
        f"{baseline:.3f}. In {100 * present:.0f} % of cases the estimate tells correctly whether a client has a class."
    )
    detail = {"guess": baseline, "clients": len(error), "present": present}
    return Finding("label_counts", QUESTION, mean, low, high, baseline, BELOW, says, False, detail)
