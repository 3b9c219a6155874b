"""KD: Distilling the Knowledge in a Neural Network.

Hinton, Vinyals, Dean. NIPS 2014 workshop on deep learning. arXiv:1503.02531, Section 2; no Algorithm is printed.

This is the variant of FedPFT's comparison for two clients (arXiv:2402.01862, Section 6). The second client trains on
its rows; then it learns on its own features from the first client's head. It sends no features. More clients form a
chain in the order of their names; the last head is the result. The server forwards only heads, and sees each head.

The comparison chooses the temperature by test accuracy. Here a client chooses it on its validation rows, or on a fifth
of its training rows, which the final distillation also uses. The comparison's Adam has the learning rate 1e-4, which
on few rows hardly moves a head; the default here is larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm import seeds
from fedfm.core.client import Client, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.linalg.params import Params
from fedfm.methods._one_shot import OneShot, head_of, rows_of, tensors_of
from fedfm.training.local_job import mini_batches

Head = tuple[Tensor, Tensor]  # (C, d), (C,)


@dataclass(frozen=True)
class KD(OneShot):
    """Clients form a chain, in which each client's head teaches the next client's head."""

    asks: ClassVar[tuple[str, ...]] = ("learn",)
    paper: ClassVar[Mapping[str, Paper]] = {  # settings of FedPFT's comparison
        "method.temperatures": Paper((1.0, 5.0, 10.0)),
        "method.local_epochs": Paper(100),
        "method.epochs": Paper(50),
        "method.learning_rate": Paper(1e-4, "with few rows it hardly changes a head"),
    }

    temperatures: tuple[float, ...] = setting((1.0, 5.0, 10.0), "candidates for the temperature T", gt=0, least=1)
    alpha: float = setting(0.5, "weight of the teacher in the loss; the labels get the rest", ge=0, le=1)
    local_epochs: int = setting(100, "epochs of training on the labels alone", ge=1)
    epochs: int = setting(50, "epochs of distillation", ge=1)
    learning_rate: float = setting(0.001, "learning rate of Adam; 0.0001 in FedPFT's comparison", gt=0)
    batch_size: int = setting(64, "batch size of training and of distillation", ge=1)

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        teacher: list[Params] = []
        for client in fed.clients:
            teacher = [fed.ask(self.learn, of=[client], least=1, w=w, teacher=each({client: teacher}))[client]]
        return teacher[0]

    @on_client
    def learn(self, client: Client, w: Params, teacher: list[Params]) -> Params:
        """Train from w on the client's labels; then, if there is a teacher, on the labels and the teacher's logits."""
        x, y = rows_of(client)
        head = self._train(tensors_of(w), x, y, self.local_epochs, client.seed)
        if teacher:
            target = F.linear(x, *tensors_of(teacher[0]))
            best = self._choose(client, head, x, y, target)
            head = self._train(head, x, y, self.epochs, client.seed, target, best)
        return head_of(client.model, *head)

    def _choose(self, client: Client, head: Head, x: Tensor, y: Tensor, target: Tensor) -> float:
        """The T with the best accuracy on rows outside the training; the first one in a tie."""
        val, held = client.data.val, torch.zeros(len(y), dtype=torch.bool)
        if len(val) and val.labels is not None:
            val_x, val_y = client.model.features(val), val.labels
        else:
            order = seeds.generator(client.seed, "validation").permutation(len(y))
            held[torch.from_numpy(order[: len(y) // 5])] = True
            val_x, val_y = x[held], y[held]
        if not len(val_y) or len(self.temperatures) == 1:
            return self.temperatures[0]

        def right(temperature: float) -> int:
            tried = self._train(head, x[~held], y[~held], self.epochs, client.seed, target[~held], temperature)
            return int((F.linear(val_x, *tried).argmax(1) == val_y).sum())

        return max(self.temperatures, key=right)

    def _train(
        self, head: Head, x: Tensor, y: Tensor, epochs: int, seed: int, target: Tensor | None = None, T: float = 1.0
    ) -> Head:
        """Adam from ``head`` on the labels and, if given, the teacher's logits ``target`` (n, C)."""
        w, b = (t.clone().requires_grad_() for t in head)
        optimiser = torch.optim.Adam([w, b], lr=self.learning_rate)
        seed = seeds.derive(seed, "batches", epochs)
        for i in map(torch.from_numpy, mini_batches(len(x), self.batch_size, epochs, seed)):
            optimiser.zero_grad()
            z = F.linear(x[i], w, b)
            loss = F.cross_entropy(z, y[i]) if target is None else distillation(z, y[i], target[i], T, self.alpha)
            torch.autograd.backward(loss)
            optimiser.step()
        return w.detach(), b.detach()


def distillation(z: Tensor, y: Tensor, target: Tensor, T: float, alpha: float) -> Tensor:
    """(1 - alpha) cross-entropy of the labels + alpha T^2 KL(teacher || student), both softened by T (eq. 1).

    The gradients of soft targets shrink by 1/T^2; the factor T^2 compensates for this.
    """
    p, q = torch.log_softmax(target / T, 1), torch.log_softmax(z / T, 1)
    soft = F.kl_div(q, p, log_target=True, reduction="batchmean")
    return (1 - alpha) * F.cross_entropy(z, y) + alpha * T**2 * soft
