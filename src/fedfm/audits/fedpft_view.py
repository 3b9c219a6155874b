"""Collect the mixtures that the server of a FedPFT run receives, by client and class, and the rows they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fedfm import seeds
from fedfm.audits.inference.rates import Array
from fedfm.audits.replay import Replay, own_sources
from fedfm.core.client import ClientId, Update
from fedfm.methods.fedpft import noisy_moments
from fedfm.methods.fedpft.fedpft import FedPFT, Noised, PeerReply
from fedfm.methods.fedpft.mixtures import Mixture
from fedfm.methods.fedpft.release_plan import Plan
from fedfm.methods.fedpft.summary import Summary, gaussian, mixtures_of
from fedfm.privacy import noise


@dataclass(frozen=True)
class SentClass:
    """One class of one client (a *cell*), as the client's message describes it.

    Attributes:
        count: number of rows that the message states. It is noisy under differential privacy, and made up if counts
            are withheld.
        size: number of rows that the mixture was fitted to, as far as the server knows it.
        mixture: the mixture; None if the server makes none, because the count does not exceed its noise.
        total: (d,) sum of the rows, as far as the message reveals the sum; in a chain, the sum over all clients so far.
        sigma: standard deviation of the noise on each entry of ``total``.
        rows: the client's training rows of the class, as row numbers of the table.
    """

    client: ClientId
    label: int
    count: float
    size: float
    mixture: Mixture | None
    total: Array
    sigma: float
    rows: Array


class View:
    """A replayed run of FedPFT.

    Attributes:
        plan: the plan of the noise in the messages, or None.
        cells: all cells in the messages, in order of clients.
        classes: names of all classes.
    """

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.method = method = replay.run.experiment.method_as(FedPFT)
        self.plan: Plan | None = method.privacy
        self.federated = replay.population.federated
        self.classes = self.federated.table.classes
        labels = self.federated.table.labels
        assert labels is not None  # noqa: S101 - a classification task has labels
        self.labels: Array = labels
        self.cells: Sequence[SentClass] = [cell for s in replay.replies for cell in self._cells(s.client, s.value)]

    def features(self, rows: Array) -> Array:
        """Features (n, d) of rows of the table, as the method uses them: with norm 1 under differential privacy."""
        return np.asarray(self._features[self._place[rows]])

    def as_used(self, x: Array) -> Array:
        """Change features into the form that the method uses, with norm 1 under differential privacy."""
        return noise.unit_rows(x) if self.plan else x

    def held_out(self, client: ClientId, label: int) -> Array:
        """Test rows of a class that have the same distribution as this client's rows.

        If clients have sources of their own, these are the client's own test rows; otherwise all test rows of the
        class.
        """
        rows = self.federated.clients[client].test if own_sources(self.replay.run) else self.federated.test
        return np.asarray(rows[self.labels[rows] == label])

    def of_class(self, label: int, *, without: ClientId = "") -> Array:
        """Training rows of a class, of all clients except ``without``."""
        rows = [c.train for name, c in sorted(self.federated.clients.items()) if name != without]
        every: Array = np.concatenate([np.zeros(0, dtype=np.int64), *rows])
        return np.asarray(every[self.labels[every] == label])

    def rng(self, *purpose: str | int) -> np.random.Generator:
        """A generator that depends on the run's seed and on the purpose."""
        return seeds.generator(self.replay.run.experiment.run.seed, "audit", *purpose)

    @cached_property
    def _row_indices(self) -> Array:
        parts = [getattr(c, part) for c in self.federated.clients.values() for part in ("train", "test")]
        return np.unique(np.concatenate([self.federated.test, *parts]))

    @cached_property
    def _place(self) -> Array:
        place = np.full(len(self.federated.table), -1, dtype=np.int64)
        place[self._row_indices] = np.arange(len(self._row_indices))
        return place

    @cached_property
    def _features(self) -> Array:
        """Features (n, d) of all rows that the audit uses; the replay has already computed the clients' features."""
        population, out = self.replay.population, None
        blocks = [(c.train, population.data(name).train) for name, c in sorted(self.federated.clients.items())]
        blocks.append((self.federated.test, population.test))
        seen = set(np.concatenate([index for index, _ in blocks]).tolist())
        if rest := [i for i in self._row_indices.tolist() if i not in seen]:
            blocks.append((np.array(rest), population.rows(np.array(rest))))
        for index, rows in blocks:
            if not len(index):
                continue
            x = rows.tensors["features"].numpy()
            if out is None:
                out = np.empty((len(self._row_indices), x.shape[1]), dtype=np.float64 if self.plan else x.dtype)
            out[self._place[index]] = self.as_used(x)
        assert out is not None  # noqa: S101 - a run without rows is refused
        return out

    def _cells(self, client: ClientId, value: Any) -> list[SentClass]:
        own = self.federated.clients[client].train
        of = {c: own[self.labels[own] == c] for c in range(len(self.classes))}
        if isinstance(value, PeerReply):
            value = value.summary
        if isinstance(value, Summary):
            return [self._sent_class(client, c, n, g, of[c]) for c, n, g in mixtures_of([value])]
        cells = [self._class_of_sums(client, value, c, of[c]) for c in of]
        return [cell for cell in cells if cell is not None]

    def _sent_class(self, client: ClientId, label: int, count: int, g: Mixture, rows: Array) -> SentClass:
        size = len(rows) if self.method.counts == "withheld" else count
        # After an M step, a mixture's mean is the mean of its rows. If counts are withheld, this is an approximation.
        total = size * (g.weights @ g.means.astype(np.float64))
        sigma = 0.0 if self.plan is None else self.plan.sum_sigma(1)
        return SentClass(client, label, count, size, g, total, sigma, rows)

    def _class_of_sums(self, client: ClientId, value: Any, label: int, rows: Array) -> SentClass | None:
        """A cell from a client's noisy sums, or from exact sums if the server only sees their mean."""
        plan, second = self.plan, None
        if isinstance(value, Noised) and plan is not None:
            count, total = float(value.counts[label]), value.totals[label].double().numpy()
            if plan.counts_public and not count:
                return None
            if plan.seconds(len(total)):
                second = value.seconds[label].double().numpy()
            cell = noisy_moments.Cell(count, total, second)
            normal = noisy_moments.to_gaussian(cell, plan, len(total), client_rows=value.rows)
            sigma = plan.sum_sigma(max(count, 1.0), client_rows=value.rows)
        elif isinstance(value, Update) and "sums" in value.delta and plan is not None:
            numbers = value.delta["sums"][label].double().numpy()
            count, dim = float(numbers[0]), self._features.shape[1]
            total, second = numbers[1 : 1 + dim], numbers[1 + dim :] if plan.seconds(dim) else None
            normal = noisy_moments.normal_of(noisy_moments.Cell(count, total, second), 0.0) if count else None
            sigma = 0.0
        else:
            return None
        mixture = None if normal is None else gaussian(*normal[1:])
        return SentClass(client, label, count, count, mixture, total, sigma, rows)
