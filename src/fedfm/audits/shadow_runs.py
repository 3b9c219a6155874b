"""Shadow runs: repetitions of the experiment on random halves of the clients' rows.

Attacks compare models that were trained with a row and models that were trained without it. A shadow run has the run's
method, settings, rounds, clients and start model, but another seed. A coin for each row decides whether the client has
the row in this shadow run; test rows have coins, too. A row of running text is a block of joined lines. Lines are
joined before coins are drawn, so that no coin splits a block. The attacker knows the distribution of the rows and the
settings, as in Carlini et al. (arXiv:2112.03570). It knows neither the clients' rows nor the run's messages.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from fedfm import seeds
from fedfm.aggregation.base import Aggregator, Mechanism, Transport
from fedfm.audits.inference.rates import Array
from fedfm.audits.recorded_run import RecordedRun
from fedfm.core.client import POOLED, ClientData, ClientId, each
from fedfm.core.new_folders import temporary_folder
from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.data.table import ClientRows
from fedfm.linalg.params import Params
from fedfm.linalg.threads import torch_threads
from fedfm.models.model import Model
from fedfm.runtime.evaluation import Evaluation
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.predictions import keeps_parts, personal
from fedfm.runtime.row_cache import encodes
from fedfm.runtime.run_directory import Run
from fedfm.training import TrainsLocally

MOST, LEAST = 16, 8  # largest and smallest number of shadow runs; fewer do not show how a row's score spreads
BUDGET = (
    40.0  # seconds of one core for all shadow runs, estimated from counts, since results must not depend on a clock
)
MACS = 5e9  # multiply-accumulates per second of a core
STEP, HEAD_STEP = 0.01, 3e-4  # seconds of a step of a complete model, and of a head, not counting multiplications
MASKING = 0.05  # seconds that a client needs to hide an update


class RowPool:
    """The rows that an attack compares: each owner's training rows (members), and rows nobody trained on (strangers).

    A row of running text is a block of joined lines, on which clients train. An owner's training lines, validation
    lines and strangers are joined separately, so that no block mixes them.

    Attributes:
        owners: the parties that train: the clients, or POOLED.
        members, strangers, val: for each owner, the places (n,) of its rows. A place is a row's index in the table, or
            the number of a block. Strangers have the same distribution as members.
        own: whether strangers are the client's own test rows; otherwise they are random global test rows.
    """

    def __init__(self, population: Partitioned, seed: int, *, pooled: bool = False) -> None:
        """Collect the rows. With ``pooled``, one owner has all training rows, and blocks mix several clients' lines."""
        self.population = population
        clients = population.federated.clients
        honest = honest_clients(population)
        self.own = any(len(clients[c].test) for c in honest)
        if self.own:
            unused = [clients[c].test for c in population.clients]
        else:
            dealt = seeds.generator(seed, "audit", "strangers").permutation(population.federated.test)
            unused = np.array_split(dealt, max(len(population.clients), 1))
        owned = {
            c: ClientRows(np.sort(clients[c].train), clients[c].val, np.sort(test))
            for c, test in zip(population.clients, unused, strict=True)
        }
        self._blocks, self._count = list[Rows](), 0
        if pooled and population.trains_on_blocks:
            owned, honest = {POOLED: _concatenate([*owned.values()])}, [POOLED]
        if population.trains_on_blocks:
            owned = {c: self._add_blocks(lines) for c, lines in owned.items()}
        self.owners, self.honest = list(owned), honest
        self.members: dict[ClientId, Array] = {c: rows.train for c, rows in owned.items()}
        self.strangers: dict[ClientId, Array] = {c: rows.test for c, rows in owned.items()}
        self.val: dict[ClientId, Array] = {c: rows.val for c, rows in owned.items()}

    def _add_blocks(self, lines: ClientRows) -> ClientRows:
        """Join these lines into blocks; returns the blocks' numbers."""
        numbers = []
        for index in (lines.train, lines.val, lines.test):
            self._blocks.append(self.population.rows(index))
            numbers.append(np.arange(self._count, self._count + len(self._blocks[-1])))
            self._count += len(numbers[-1])
        return ClientRows(*numbers)

    @functools.cached_property
    def order(self) -> Array:
        """Places of all rows of the pool, including validation rows, in ascending order."""
        return np.unique(np.concatenate([*self.members.values(), *self.strangers.values(), *self.val.values()]))

    @functools.cached_property
    def _all(self) -> Rows:
        if not self._blocks:
            return self.population.rows(self.order)
        tokens = [rows.tokens for rows in self._blocks if rows.tokens is not None]
        return Rows(tokens=Tokens.joining(tokens), pad=self._blocks[0].pad)

    def rows(self, index: Array) -> Rows:
        """The rows at these places, as the model reads them; each row is prepared once."""
        return self._all.take(np.searchsorted(self.order, index))

    def compared_rows(self, client: ClientId) -> Rows:
        """An owner's members and strangers, in this order."""
        return self.rows(self.index(client))

    def index(self, client: ClientId) -> Array:
        """Places (n,) of :meth:`compared_rows`."""
        return np.concatenate([self.members[client], self.strangers[client]]).astype(np.int64)

    def labels(self, client: ClientId) -> Array | None:
        """Labels (n,) of :meth:`compared_rows`; None for language models.

        The label of a block says whether the block is complete. A text's last block is shorter, and its tokens are
        harder to predict.
        """
        if self._blocks and (tokens := self._all.tokens) is not None:
            return np.asarray(tokens.length[self.index(client)] == self._all.longest, dtype=np.int64)
        labels = self.population.federated.table.labels
        return None if labels is None else np.asarray(labels)[self.index(client)]


def honest_clients(population: Partitioned) -> list[ClientId]:
    """The clients that follow the method, which are all except simulated attackers."""
    bad = population.attackers.names if population.attackers is not None else ()
    return [c for c in population.clients if c not in bad]


def trainings(run: Run, clients: Sequence[ClientId], last: int) -> Counter[ClientId]:
    """In how many of the rounds 1 to ``last`` each client trained, by the cohorts in ``metrics.jsonl``.

    A client that never trained is missing. All clients trained in all rounds if the file lacks a round, if it names no
    cohort, or if the rows are pooled.
    """
    cohorts = [line["cohort"] for line in run.metrics() if 0 < line["round"] <= last]
    if run.experiment.method.needs.pooled or len(cohorts) < last or not any(cohorts):
        return Counter(dict.fromkeys(clients, last))
    return Counter(client for cohort in cohorts for client in cohort)


def training_clients(run: Run, clients: Sequence[ClientId]) -> set[ClientId]:
    """The clients whose rows the final model was trained on."""
    result = run.manifest["result"]
    return set(trainings(run, clients, int(result["details"].get("model_of_round", result["rounds"]))))


def unit(population: Partitioned) -> str:
    """A sentence for the end of a finding that says what a row is; "" if rows are rows of the table."""
    if not population.trains_on_blocks:
        return ""
    length = population.model.tools.max_length
    return f" A row is not a line, but a block of at most {length} tokens of joined lines, as clients train on it."


def _concatenate(parts: Sequence[ClientRows]) -> ClientRows:
    """The rows of several clients, joined as the rows of one owner."""
    names = ("train", "val", "test")
    return ClientRows(*(np.sort(np.concatenate([getattr(part, name) for part in parts])) for name in names))


class Half:
    """A population in which each client has only the rows that coins selected.

    Attributes:
        taken: for each client the places (m,) of its rows in the pool, members first, and whether each was selected.
    """

    attackers = None

    def __init__(self, pool: RowPool, number: int, seed: int) -> None:
        self._pool = pool
        self.model: Model = pool.population.model
        self.client_model = pool.population.client_model
        self.taken: dict[ClientId, tuple[Array, Array]] = {}
        for c in pool.owners:
            rows = pool.index(c)
            coins = seeds.generator(seed, "audit", "coins", number, c).random(len(rows)) < 0.5
            if len(rows) and not coins.any():  # without any row the client would not train, although it did in the run
                coins[:1] = True
            self.taken[c] = rows, coins

    @property
    def clients(self) -> Sequence[ClientId]:
        return self._pool.population.clients

    def data(self, client: ClientId) -> ClientData:
        """The client's rows in this shadow run."""
        owned = self._of(client) if client in self.taken else _concatenate([self._of(c) for c in self.clients])
        rows = self._pool.rows
        return ClientData(lambda: rows(owned.train), lambda: rows(owned.val), lambda: rows(owned.test))

    def _of(self, client: ClientId) -> ClientRows:
        rows, coins = self.taken[client]
        return ClientRows(np.sort(rows[coins]), self._pool.val[client], rows[:0])


def affordable(run: Run, population: Partitioned) -> int:
    """The number of shadow runs that the budget allows, at most :data:`MOST`; 0 if it is below :data:`LEAST`.

    It is also 0 if some clients never trained. A shadow run draws its own cohorts, so a row that its coin selected
    would often be in no training.
    """
    if not training_clients(run, population.clients).issuperset(population.clients):
        return 0
    seconds = cost(run, population)
    number = MOST if not seconds else min(MOST, int(BUDGET / seconds))
    return number if number >= LEAST else 0


def cost(run: Run, population: Partitioned) -> float:
    """Estimate the seconds of one shadow run, from the numbers of rounds, clients that trained, rows and operations."""
    method = run.experiment.method
    times = trainings(run, population.clients, int(run.manifest["result"]["rounds"]))
    number, sizes = times.total(), population.federated.clients
    seconds = 0.0
    if isinstance(method, TrainsLocally):
        operations = run.manifest["ledger"].get("operations") or {}
        seconds += number * float(operations.get("macs_per_client_round", 0.0)) / MACS
        noisy = run.experiment.aggregation.mechanism.plan is not None  # DP-SGD computes a gradient for each row
        one = HEAD_STEP if encodes(population.model) and not noisy else STEP
        rows = ((len(sizes[c].train), k) for c, k in times.items())
        seconds += sum(k * method.local.steps(n, population.model) for n, k in rows if n) * one
    else:  # methods with one round fit heads
        seconds += number * 0.05
    if _transport(run.experiment.aggregation).form != "plain":
        seconds += number * MASKING
    return seconds


def _transport(aggregator: Aggregator) -> Transport:
    return aggregator.transport if type(aggregator.mechanism) is not Mechanism else Transport()


def _aggregator(run: Run) -> Aggregator:
    """The run's aggregator. If it only hides updates, return the plain mean, which gives the same result faster."""
    ours = run.experiment.aggregation
    if type(ours.mechanism) is not Mechanism or ours.transport.form == "plain":
        return ours
    return Aggregator()


def shadow_models(run: Run, half: Half, number: int) -> Mapping[ClientId, Params]:
    """Final models of a shadow run: one per client if each has its own, otherwise one under the key ""."""
    method = run.experiment.method
    result = run.manifest["result"]
    seed = seeds.derive(run.experiment.run.seed, "audit", "shadow", number)
    with temporary_folder("fedfm-audit-") as private, torch_threads(1):
        shadow = RecordedRun(method, half, private, seed=seed, aggregator=_aggregator(run))
        for turn in shadow.turns(int(result["details"].get("model_of_round", result["rounds"]))):
            state = turn.after
        if not personal(method):
            return {"": method.params_for(state, "")}
        fed = shadow.fed
        models = {c: method.params_for(state, c) for c in fed.clients}
        if keeps_parts(method):
            models = dict(fed.ask(Evaluation(method).reveal, counted=False, w=each(models)))
        return models
