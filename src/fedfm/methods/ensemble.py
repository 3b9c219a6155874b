"""Ensemble: One-Shot Federated Learning.

Guha, Talwalkar, Smith. NeurIPS 2018 workshop on machine learning on devices. arXiv:1902.11175, Algorithm 1 with all
clients selected. The heads are combined by the largest probability over the clients, as in FedPFT's comparison
(arXiv:2402.01862, Section 6), or by their mean probability.

The server sees every client's head, and the result contains all heads. A head gives probability 0 to a class that its
client has not seen. A head trained on one class gives that class probability 1 on every row and would win every
maximum. Such heads are ignored if another head has seen at least two classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfm.core.capabilities import Predictor, Traits
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.methods._one_shot import OwnHeads, as_heads, combine, each_head, mean_probability
from fedfm.models.model import Model
from fedfm.training.fit_head import NOBODY


@dataclass(frozen=True)
class Ensemble(Predictor, OwnHeads):
    """Each client trains its own head; all heads predict together."""

    traits: ClassVar[Traits] = Traits(independent_messages=True)
    asks: ClassVar[tuple[str, ...]] = ("fit",)
    paper: ClassVar[Mapping[str, Paper]] = {
        "method.combine": Paper("mean", "as in FedPFT's comparison"),
    }

    combine: str = setting("max", "the largest probability over the clients, or their mean", choices=("max", "mean"))

    def init(self, fed: Federation) -> Params:
        return as_heads(super().init(fed))

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        return as_heads(*(update.delta for update in self.ask_heads(fed)))

    def logits(self, model: Model, w: Params, rows: Rows) -> Tensor:
        """Logarithm of max_k p_k(c|x), or of mean_k p_k(c|x)."""
        if self.combine == "mean":
            return mean_probability(model, w, rows)
        heads = each_head(w)
        informed = [(w_k, b_k) for w_k, b_k in heads if int((b_k > NOBODY / 2).sum()) > 1]
        return combine(informed or heads, model.features(rows), torch.maximum).float()
