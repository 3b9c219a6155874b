"""KD: Distilling the Knowledge in a Neural Network.

Hinton, Vinyals, Dean. NIPS 2014 workshop on deep learning. arXiv:1503.02531, Section 2 (no Algorithm is printed), as
in FedPFT's comparison for two clients (arXiv:2402.01862, Section 6): the second client trains on its rows, then learns
from the first one's head on its own features, which travel nowhere. More clients form a chain in order of names; the
last head is the result. The server only carries heads, and sees each.

The comparison chooses the temperature by test accuracy. Here it is chosen on rows of the client's own: its validation
rows, or a fifth of its training rows, which the final distillation then uses again. Its Adam runs at 1e-4, which on
few rows hardly moves a head; the default here is larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm import seeds
from fedfm.core.client import Client, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.linalg.params import Params
from fedfm.methods._one_shot import OneShot, head_of, passes, rows_of, tensors_of

Head = tuple[Tensor, Tensor]  # (C, d), (C,)


@dataclass(frozen=True)
class KD(OneShot):
    """Along a chain of clients, each head teaches the next client's."""

    asks: ClassVar[tuple[str, ...]] = ("learn",)

    temperatures: tuple[float, ...] = setting((1.0, 5.0, 10.0), "T, to choose among", gt=0, least=1)
    alpha: float = setting(0.5, "share of the teacher in the loss; the labels have the rest", ge=0, le=1)
    local_epochs: int = setting(100, "on the labels alone", ge=1)
    epochs: int = setting(50, "of distillation", ge=1)
    learning_rate: float = setting(0.001, "Adam's; 0.0001 in FedPFT's comparison", gt=0)
    batch_size: int = setting(64, "of both", ge=1)

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        teacher: list[Params] = []
        for client in fed.clients:
            teacher = [fed.ask(self.learn, of=[client], least=1, w=w, teacher=each({client: teacher}))[client]]
        return teacher[0]

    @on_client
    def learn(self, client: Client, w: Params, teacher: list[Params]) -> Params:
        """From w on the client's labels; then, where there is a teacher, from it too."""
        x, y = rows_of(client)
        head = self._train(tensors_of(w), x, y, None, 1.0, self.local_epochs, client.seed)
        if teacher:
            target = F.linear(x, *tensors_of(teacher[0]))
            best = self._choose(client, head, x, y, target)
            head = self._train(head, x, y, target, best, self.epochs, client.seed)
        return head_of(client.model, *head)

    def _choose(self, client: Client, head: Head, x: Tensor, y: Tensor, target: Tensor) -> float:
        """The T with the best accuracy on rows that it did not train on; the first of equals."""
        held = torch.zeros(len(y), dtype=torch.bool)
        val_x, val_y = x[:0], y[:0]
        if len(client.data.val) and client.data.val.labels is not None:
            val_x, val_y = client.model.features(client.data.val), client.data.val.labels
        elif len(y) >= 5:
            order = seeds.generator(client.seed, "validation").permutation(len(y))
            held[torch.from_numpy(order[: len(y) // 5])] = True
            val_x, val_y = x[held], y[held]
        if not len(val_y) or len(self.temperatures) == 1:
            return self.temperatures[0]
        right = []
        for temperature in self.temperatures:
            tried = self._train(head, x[~held], y[~held], target[~held], temperature, self.epochs, client.seed)
            right.append(int((F.linear(val_x, *tried).argmax(1) == val_y).sum()))
        return self.temperatures[right.index(max(right))]

    def _train(
        self, head: Head, x: Tensor, y: Tensor, target: Tensor | None, temperature: float, epochs: int, seed: int
    ) -> Head:
        """Adam from ``head``; on the labels alone where there is no teacher's ``target`` (n, C)."""
        w, b = (t.clone().requires_grad_() for t in head)
        optimiser = torch.optim.Adam([w, b], lr=self.learning_rate)
        for i in passes(len(x), self.batch_size, epochs, seeds.derive(seed, "batches", epochs)):
            optimiser.zero_grad()
            z = F.linear(x[i], w, b)
            if target is None:
                loss = F.cross_entropy(z, y[i])
            else:
                loss = distillation(z, y[i], target[i], temperature, self.alpha)
            torch.autograd.backward(loss)
            optimiser.step()
        return w.detach(), b.detach()


def distillation(z: Tensor, y: Tensor, target: Tensor, temperature: float, alpha: float) -> Tensor:
    """(1 - alpha) cross-entropy of the labels + alpha T^2 KL(teacher || student), both softened by T (eq. 1).

    T^2 makes up for the gradients of soft targets, which shrink by 1/T^2.
    """
    soft = F.kl_div(
        torch.log_softmax(z / temperature, 1),
        torch.log_softmax(target / temperature, 1),
        log_target=True,
        reduction="batchmean",
    )
    return (1 - alpha) * F.cross_entropy(z, y) + alpha * temperature**2 * soft
