"""FedPGP: Harmonizing Generalization and Personalization in Federated Prompt Learning.

Cui, Li, Wang, Shi. ICML 2024. arXiv:2405.09771. Client i's prompt is p_i = p_G + U_i V_i; only p_G is sent.

Algorithm, loss, the size-weighted mean of p_G and the normal initial values are those of the authors' code. Its scripts
give the defaults b = 8, mu = 0.5, tau = 0.5, SGD at 0.001 and 2 local epochs. In the paper a hand-written prompt guides
p_G. The authors' code uses placeholder words for this prompt; here it is in ``model.templates``. Two things differ from
their code: every client first draws its own U_i and V_i, and a client that joins after training starts from p_G
and trains it as one prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm import seeds
from fedfm.core.capabilities import Joinable, Needs
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods._personal import KeepingFedAvg
from fedfm.models.dual_encoder import need
from fedfm.models.model import Model
from fedfm.training import SGD, Local
from fedfm.training.local_job import Job
from fedfm.training.loop import Flat
from fedfm.training.update_rules import Rule

DEVIATION = 0.02  # standard deviation of the initial entries of U_i, V_i and p_G


@dataclass(frozen=True)
class FedPGP(Joinable, KeepingFedAvg):
    """FedAvg of a global prompt, to which every client adds a low-rank prompt that it keeps.

    A contrastive loss holds the global prompt near the hand-written one.
    """

    needs: ClassVar[Needs] = Needs(adaptation="prompt", adaptations=("prompt",), tasks=("zero_shot",))

    rank: int = setting(8, "b, rank of U_i V_i; if it is 0, every client has the global prompt", ge=0)
    mu: float = setting(0.5, "weight of the contrastive loss", ge=0, finite=True)
    tau: float = setting(0.5, "temperature of the contrastive loss", gt=0, finite=True)
    local: Local = setting(SGD(learning_rate=0.001, epochs=2), "client optimiser: E, B, eta")

    def init(self, fed: Federation) -> Params:
        need(fed.model).written_texts()  # a template that is too long is refused here
        return fed.initial

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        low_rank = client.memory.get("low rank")
        p_G, low_rank = self.local_pass(client, w, self.draw_factors(client, w) if low_rank is None else low_rank)
        client.memory["low rank"] = low_rank
        return Update(p_G - w, self.weight(client), client.metrics)

    def draw_factors(self, client: Client, w: Params) -> Params:
        """The initial U_i (M, b) and V_i (b, h), N(0, 0.02^2)."""
        (p_G,), b = w.values(), self.rank
        rng = torch.Generator().manual_seed(seeds.derive(client.seed, "low rank"))
        shapes = {"U": (len(p_G), b), "V": (b, p_G.shape[1])}
        return Params({name: DEVIATION * torch.randn(shape, generator=rng) for name, shape in shapes.items()})

    def local_pass(self, client: Client, w: Params, low_rank: Params) -> tuple[Params, Params]:
        """Train p_G, U_i and V_i together for E epochs on the loss of the rows + mu times :func:`contrastive`.

        Returns:
            the client's p_G, and its U_i and V_i.
        """
        model, rows = need(client.model), client.data.train
        if rows.labels is None:
            raise InputError("data.label: fedpgp classifies; the rows have no labels", key="data.label")
        dual, (name,), device = model.dual, tuple(w), model.device
        live = {n: t.detach().to(device).clone().requires_grad_() for n, t in {"p_G": w[name], **low_rank}.items()}
        p_G, U, V = live.values()  # (M, h), (M, b), (b, h)
        images, z_C = model.features(rows), model.written_texts() if self.mu else None  # (n, d), (C, d)
        flat = Flat(live)
        rule, total, apart, seen = Rule(self.local, flat.p), 0.0, 0.0, 0
        job = Job(client, w, self.local)
        for index, rule.eta in zip(job.orders(), job.rates(), strict=True):
            z_i = dual.encode_texts(p_G + U @ V)  # (C, d)
            logits = dual.logits(images[index].to(device), z_i)
            loss: Any = model.task.objective(logits, rows.labels[index].to(device))
            if z_C is not None:
                of_texts = contrastive(dual.encode_texts(p_G), z_C, z_i, self.tau)
                loss, apart = loss + self.mu * of_texts, apart + of_texts.item() * len(index)
            loss.backward()
            self.local.shorten(flat.g)
            rule.step(flat.p, flat.g)
            flat.g.zero_()
            seen, total = seen + len(index), total + loss.item() * len(index)
        client.metrics |= {"loss": total / max(seen, 1), "contrastive_loss": apart / max(seen, 1)}
        return Params({name: p_G.detach().cpu()}), Params({"U": U.detach().cpu(), "V": V.detach().cpu()})

    def own(self, client: Client, w: Params) -> Params:
        """The client's prompt p_i = p_G + U_i V_i, or p_G before its first local pass."""
        low_rank = client.memory.get("low rank")
        return w if low_rank is None else w.map(lambda p: p + (low_rank["U"] @ low_rank["V"]).reshape(-1))

    def start_of(self, client: Client, w: Params) -> Params:
        return w  # for comparison: the global prompt alone

    def newcomer(
        self, model: Model, w: Params, w_0: Params, client: ClientId, adapt: Callable[[Params], Params]
    ) -> tuple[Params, dict[ClientId, float]]:
        """The global prompt; no client has a weight in it."""
        return w, {}


def contrastive(z_G: Tensor, z_C: Tensor, z_i: Tensor, tau: float) -> Tensor:
    """-log(e^(<z_G, z_C> / tau) / (e^(<z_G, z_C> / tau) + e^(<z_G, z_i> / tau))), the mean over the classes, a scalar.

    Args:
        z_G: text features of the global prompt, (C, d), norm 1.
        z_C: text features of the hand-written prompts, which attract z_G.
        z_i: text features of the client's prompt, which repel z_G.
    """
    near, apart = ((z_G * z).sum(-1) / tau for z in (z_C, z_i))  # (C,)
    return F.softplus(apart - near).mean()
