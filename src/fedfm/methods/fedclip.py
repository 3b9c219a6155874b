"""FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning.

Lu, Hu, Wang, Xie. IEEE Data Engineering Bulletin 2023. arXiv:2302.13485, Algorithm 1. Clients train and send only an
attention adapter, which acts on the frozen model's image features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfm import seeds
from fedfm.core.capabilities import Needs, Predictor
from fedfm.core.client import Client, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.models.decay import no_weight_decay
from fedfm.models.dual_encoder import expert_features, expert_texts, need
from fedfm.models.model import Model
from fedfm.training import AdamW, Local
from fedfm.training.local_job import Job
from fedfm.training.loop import Flat
from fedfm.training.update_rules import Rule


@dataclass(frozen=True)
class FedCLIP(Predictor, FedAvg):
    """FedAvg of an attention adapter: V * softmax(W_2 tanh(W_1 V)), normalised, replaces CLIP's image features V."""

    # The model's LoRA stays untrained, so it adds nothing.
    needs: ClassVar[Needs] = Needs(adaptations=("lora",), tasks=("zero_shot",))

    local: Local = setting(AdamW(learning_rate=2e-4, weight_decay=0.05, decay_of="all"), "client optimiser: E, B, eta")

    def init(self, fed: Federation) -> Params:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(fed.seed, "attention adapter"))
            return Params(Attention(need(fed.model).dual.width).state_dict())

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        return w + fed.mean(self.train, of=fed.sample(self.fraction), like=w.layout, w=w)

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        model, rows = need(client.model), client.data.train
        if rows.labels is None:
            raise InputError("data.label: fedclip classifies; the rows have no labels", key="data.label")
        start = model.params()
        V, T = expert_features(model, start, rows), expert_texts(model, start).cpu()
        adapter = Attention(V.shape[1])
        adapter.load_state_dict(w)
        flat = Flat(dict(adapter.named_parameters()))
        rule = Rule(self.local, flat.p, flat.places(no_weight_decay(adapter)))
        total, seen = 0.0, 0
        job = Job(client, w, self.local)
        for index, rule.eta in zip(job.orders(), job.rates(), strict=True):
            logits = model.dual.scale.cpu() * adapter(V[index]) @ T.T
            loss: Any = model.task.objective(logits, rows.labels[index])
            loss.backward()
            self.local.shorten(flat.g)
            rule.step(flat.p, flat.g)
            flat.g.zero_()
            seen, total = seen + len(index), total + float(loss.detach()) * len(index)
        n_k = len(rows) if self.weighting == "size" else 1
        client.trained = Params(adapter.state_dict())
        return Update(client.trained - w, n_k, {"loss": total / max(seen, 1)})

    def logits(self, model: Model, w: Params, rows: Rows) -> Tensor:
        """Scaled cosines s <V', T> of the adapted features, (n, C)."""
        dual, start = need(model).dual, model.params()
        V, T = expert_features(model, start, rows), expert_texts(model, start).cpu()
        adapter = Attention(dual.width)
        adapter.load_state_dict(w)
        with torch.no_grad():
            said: Tensor = dual.scale.cpu() * adapter(V) @ T.T
        return said

    def validate(self) -> None:
        if self.local.personal:
            raise InputError(
                "method.local.name: fedclip trains one adapter for all clients; take a plain optimiser, e.g. adamw",
                key="method.local.name",
            )


class Attention(nn.Module):
    """V * softmax(W_2 tanh(W_1 V)), scaled to norm 1."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.W_1, self.W_2 = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, V: Tensor) -> Tensor:
        """Adapted image features (b, d) from image features (b, d)."""
        return F.normalize(V * self.W_2(torch.tanh(self.W_1(V))).softmax(-1), dim=-1)
