"""FedKT: Practical One-Shot Federated Learning for Cross-Silo Setting.

Li, He, Song. IJCAI 2021. arXiv:2010.01017, Algorithm 1 without differential privacy (FedKT-L0).

The paper needs public unlabelled rows. Here each client publishes the features of a fraction ``public`` of its rows,
without their labels, to every other client. If that reveals too much, do not use FedKT; a silo whose
policy does not allow single replies (``reply``) refuses the method. The server also sees each client's students.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm import seeds
from fedfm.core import update_metrics
from fedfm.core.checks import match
from fedfm.core.client import Client, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.errors import E_FIELD, E_SHAPE, ClientFault
from fedfm.linalg.params import Params
from fedfm.methods._convergence import Missed, tell
from fedfm.methods._one_shot import OwnHeads, head_of, rows_of, tensors_of
from fedfm.training.fit_head import fit_rows


@dataclass(frozen=True)
class Students:
    """A client's reply: its students, and metrics of the fits of students and teachers."""

    heads: list[Params]
    metrics: dict[str, float]

    def __post_init__(self) -> None:
        update_metrics.check(self.metrics)


@dataclass(frozen=True)
class FedKT(OwnHeads):
    """Votes in two tiers: a client's teachers label public rows for its students; all students label these rows
    for the server.
    """

    asks: ClassVar[tuple[str, ...]] = ("publish", "students")
    paper: ClassVar[Mapping[str, Paper]] = {
        "method.public": Paper(
            "a public data set", "there is no public data set, so clients publish features of their rows"
        ),
        "method.partitions": Paper(2),
        "method.subsets": Paper(5),
    }

    public: float = setting(0.1, "fraction of a client's rows whose features go to all other clients", gt=0, le=1)
    partitions: int = setting(2, "s, number of partitions of a client's rows; each trains one student", ge=1)
    subsets: int = setting(5, "t, number of subsets of each partition; each trains one teacher", ge=1)

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        dim, classes = fed.model.feature_dim, len(fed.model.classes)

        def is_features(x: Tensor) -> None:
            if x.dim() != 2 or x.shape[1] != dim or x.dtype != torch.float32:
                raise ClientFault(E_SHAPE, f"public features {tuple(x.shape)} {x.dtype}, expected (n, {dim}) float32")

        def are_students(reply: Students) -> None:
            if len(reply.heads) != self.partitions:
                raise ClientFault(E_FIELD, f"{len(reply.heads)} students, expected {self.partitions}")
            for student in reply.heads:
                match(student, fed.initial.layout, "student")

        d_aux = torch.cat(list(fed.ask(self.publish, check=is_features).values()))
        order = seeds.generator(fed.seed_for("public"), "order").permutation(len(d_aux))
        d_aux = d_aux[torch.from_numpy(order)]  # shuffled, so that the order does not reveal a row's client
        replies = fed.ask(self.students, check=are_students, d_aux=d_aux)
        for client, reply in replies.items():
            tell(fed, client, reply.metrics)
        labels = torch.stack(  # (K, s, n)
            [torch.stack([F.linear(d_aux, *tensors_of(s)).argmax(1) for s in r.heads]) for r in replies.values()]
        )
        v = consistent_votes(labels, classes)
        known = v.sum(1) > 0  # drop rows on which no client's students agree
        if not known.any():
            v, known = F.one_hot(labels, classes).sum((0, 1)), ~known
        missed = Missed()
        final = fit_rows(d_aux[known], v[known].argmax(1), classes, self.head, fed.seed_for("head"), missed)
        tell(fed, "server", missed.metrics)
        return head_of(fed.model, *final)

    @on_client
    def publish(self, client: Client) -> Tensor:
        """Features of a random fraction of the rows, at least one row."""
        x, _ = rows_of(client)
        order = seeds.generator(client.seed, "public").permutation(len(x))
        return x[torch.from_numpy(order[: math.ceil(self.public * len(x))])]

    @on_client
    def students(self, client: Client, d_aux: Tensor) -> Students:
        """Lines 2 to 13: the teachers of each partition train one student. A student sees only public rows."""
        x, y = rows_of(client)
        classes, students, missed = len(client.model.classes), [], Missed()
        for j in range(self.partitions):
            order = torch.from_numpy(seeds.generator(client.seed, "partition", j).permutation(len(y)))
            parts = [part for part in order.tensor_split(self.subsets) if len(part)]
            teachers = [fit_rows(x[p], y[p], classes, self.head, client.seed, missed) for p in parts]
            labels = majority([F.linear(d_aux, *teacher).argmax(1) for teacher in teachers], classes)
            student = fit_rows(d_aux, labels, classes, self.head, client.seed, missed)
            students.append(head_of(client.model, *student))
        return Students(students, missed.metrics)


def majority(labels: Sequence[Tensor], classes: int) -> Tensor:
    """The class with most votes of the teachers for each row, (n,); in a tie the first class."""
    return F.one_hot(torch.stack(list(labels)), classes).sum(0).argmax(1)


def consistent_votes(labels: Tensor, classes: int) -> Tensor:
    """(n, C) votes from labels (K, s, n): a client has s votes if all its students agree, else none (line 18)."""
    agree = (labels == labels[:, :1]).all(1)  # (K, n)
    votes = F.one_hot(labels[:, 0], classes) * agree[..., None]
    return labels.shape[1] * votes.sum(0)
