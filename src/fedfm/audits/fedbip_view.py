"""Compute what a server learns from the task vectors that it receives: scores of rows, and the clients' weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fedfm import seeds
from fedfm.audits.fedbip_colluders import Full
from fedfm.audits.head_view import head_names
from fedfm.audits.inference.rates import Array
from fedfm.audits.recorded_run import Turn
from fedfm.audits.replay import own_sources
from fedfm.core.client import ClientId, Update
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.methods.fedbip.fedbip import FedBip
from fedfm.models.adapters import lora
from fedfm.models.model import Model
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run

CLIENTS, ROWS = 40, 150  # at most 40 clients are scored, each on at most 150 of its training rows and 150 other rows
ALIGNED = 300  # number of rows whose gradients are computed, with one backward pass each
PUBLIC, WAY = (
    200,
    (0.0, 0.25, 0.5, 0.75, 1.0),
)  # number of the server's own rows; points between theta_bar (0) and theta (1)


@dataclass
class Scored:
    """Training rows of a client, and rows of the same classes that the client did not train on."""

    members: Rows
    strangers: Rows
    drop: list[Array] = field(
        default_factory=lambda: [np.zeros(0), np.zeros(0)]
    )  # drops of the loss, summed over rounds
    last: tuple[Params, Params] | None = None  # theta_bar, tau


class Eye:
    """A watch of a replay that reads task vectors.

    It scores rows in every round. It keeps the head in each client's first task vector, the weights of all rounds, and
    one round in which all clients took part.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._scored: dict[ClientId, Scored] | None = None
        self._first: Params | None = None  # the first start vector that was sent
        self.heads: dict[ClientId, Params] = {}  # head in the first tau of each client
        self.p: list[Array] = []  # for each round, the weights (L, K, K)
        self.full: Full | None = None
        self.predicted: dict[ClientId, Array] = {}  # for each client, the probabilities of :func:`_mean_probabilities`

    def see(self, turn: Turn, population: Partitioned) -> None:
        if not turn.round:
            return
        method, model = self._run.experiment.method, population.model
        deltas = {s.client: s.value.delta for s in turn.replies if isinstance(s.value, Update)}
        before = {c: _vector(turn.payloads[c]) for c in deltas}
        sent = {c: tau.cast(before[c].layout) for c, tau in deltas.items()}  # converts 16-bit floats
        self._first = self._first or next(iter(before.values()))
        names = head_names(model)
        if names is not None:
            kept = [n for n in names if n is not None]
            first = self._first.only(kept)
            fresh = {c: x for c, x in sent.items() if c not in self.heads and _same(before[c].only(kept), first)}
            if population.federated.table.labels is not None and len(population.test):
                few = [c for c in sorted(fresh) if len(self.predicted) < CLIENTS]
                self.predicted |= {c: _mean_probabilities(population, before[c], fresh[c]) for c in few}
            self.heads |= {c: tau.only(kept) for c, tau in fresh.items()}
        for client, scored in self.scored_rows(population).items():
            if client in sent:
                self._score(model, scored, before[client], sent[client])
        if (p := method.arrays(turn.after).get("weights")) is not None:
            self.p.append(np.asarray(p, dtype=np.float64))
        every = len(sent) == len(population.clients) and turn.round < method.rounds
        if every and isinstance(method, FedBip):  # the colluders' attack solves FedBip's formula
            self.full = Full(turn.round, sent, before, turn.after.theta_bar, self.p[-1])

    def scored_rows(self, population: Partitioned) -> dict[ClientId, Scored]:
        """The rows to score; they are drawn once."""
        if self._scored is None:
            rng, clients = self.rng("rows"), list(population.clients)
            drawn = sorted(rng.permutation(clients)[:CLIENTS].tolist())
            found = {c: _rows(population, c, own_sources(self._run), rng) for c in drawn}
            self._scored = {c: s for c, s in found.items() if len(s.members) and len(s.strangers)}
        return self._scored

    def rng(self, *purpose: str) -> np.random.Generator:
        """A generator that depends on the run's seed and on the purpose."""
        return seeds.generator(self._run.experiment.run.seed, "audit", "task_vector", *purpose)

    def _score(self, model: Model, s: Scored, theta_bar: Params, tau: Params) -> None:
        with at_rank(model, theta_bar, tau) as (start, change):
            for i, rows in enumerate((s.members, s.strangers)):
                model.load(start)
                loss = row_losses(model, rows)
                model.load(start + change)
                drop = loss - row_losses(model, rows)
                s.drop[i] = s.drop[i] + drop if len(s.drop[i]) else drop
        s.last = theta_bar, tau


# --- rows and the model -----------------------------------------------------------------------------------------------


def row_losses(model: Model, rows: Rows) -> Array:
    """(n,) float64: the loss of each row; for a text the mean over its tokens."""
    if rows.labels is not None and not model.is_language_model:
        return F.cross_entropy(model.predict(rows).double(), rows.labels, reduction="none").numpy()
    found = []
    with torch.no_grad(), model.evaluating():
        if model.task.loss_is_opaque:  # the user's loss returns only the mean over a batch
            return np.array([float(model.loss(batch)) for batch in rows.batches(1)], dtype=np.float64)
        for batch in (rows.to_padded() if rows.tokens is not None else rows).batches(64):
            sums, counts = model.task.row_losses(model, batch)
            found.append((sums.double() / counts.clamp_min(1).to(sums.device)).cpu())
    return torch.cat(found).numpy() if found else np.zeros(0)


@contextmanager
def at_rank(model: Model, theta_bar: Params, tau: Params) -> Iterator[tuple[Params, Params]]:
    """Context manager: sets the model's LoRA scale for the vectors' rank; yields both vectors in the model's shapes."""
    rank = lora.rank_of(theta_bar)
    if theta_bar.layout is model.layout or rank is None:
        yield theta_bar, tau
    else:
        with lora.scale_for_rank(model, rank):
            yield lora.pad_rank(theta_bar, model.layout), lora.pad_rank(tau, model.layout)


def alignments(model: Model, rows: Rows, theta_bar: Params, tau: Params) -> Array:
    """For each row (n,): the cosine of tau with the negative gradient of the row's loss at theta_bar."""
    model.load(theta_bar)
    live = model.live()
    at = torch.cat([tau[name].reshape(-1).double() for name in live])
    found = []
    with model.evaluating(), torch.enable_grad():
        for i in range(len(rows)):
            loss = model.loss(rows.batch([i]))
            grads = torch.autograd.grad(loss, list(live.values()), allow_unused=True)
            known = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, live.values(), strict=True)]
            g = torch.cat([x.detach().reshape(-1).double().cpu() for x in known])
            scale = float(g.norm() * at.norm())
            found.append(-float(g @ at) / scale if scale else 0.0)
    return np.array(found)


def _rows(population: Partitioned, client: ClientId, own: bool, rng: np.random.Generator) -> Scored:
    data = population.data(client)
    members, strangers = data.train, data.test if own else population.test
    if members.labels is not None and strangers.labels is not None:
        same = torch.isin(strangers.labels, torch.unique(members.labels))
        strangers = strangers.take(torch.nonzero(same).reshape(-1))
    members, strangers = (r.take(np.sort(rng.permutation(len(r))[:ROWS])) for r in (members, strangers))
    return Scored(members, strangers)


def _mean_probabilities(population: Partitioned, theta_bar: Params, tau: Params) -> Array:
    """``Q`` (C, C): mean predicted probabilities for the server's own rows of each class.

    The mean is also over several points between theta_bar and theta.
    """
    model, rows = population.model, public(population)
    classes = len(model.classes)
    q, counts = np.zeros((classes, classes)), np.zeros(classes)
    assert rows.labels is not None  # noqa: S101 - a classifier's rows have labels
    labels = rows.labels.numpy()
    with at_rank(model, theta_bar, tau) as (start, change), torch.no_grad():
        for share in WAY:
            model.load(start + share * change)
            np.add.at(q, labels, torch.softmax(model.predict(rows).double(), 1).numpy())
            counts += np.bincount(labels, minlength=classes)
    known = counts > 0
    q[known] /= counts[known, None]
    q[~known] = q[known].mean(0)
    return q


def public(population: Partitioned) -> Rows:
    """The server's own rows: some of the global test rows."""
    n = len(population.test)
    return population.test.take(np.unique(np.linspace(0, n - 1, min(n, PUBLIC)).astype(np.int64)))


def _vector(payload: Mapping[str, Any]) -> Params:
    """The model from which the client's local training starts: theta_bar_i, FedAMP's u_i or FedAWA's w."""
    return next(value for value in payload.values() if isinstance(value, Params))


def _same(x: Params, y: Params) -> bool:
    return x is y or all(torch.equal(flat, y.flats[dtype]) for dtype, flat in x.flats.items())
