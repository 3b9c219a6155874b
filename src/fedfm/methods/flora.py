"""FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations.

Wang, Shen, He, Sun, Wang, Lyu, Li. NeurIPS 2024. arXiv:2409.05976. Algorithm: stacking in place of averaging.

Each round's stack is merged into the frozen weights, and adapters restart: a new random A, equal for all clients, and
B = 0. Clients keep nothing between rounds: they receive the sum of all stacks so far, so an absent or late client has
the same weights as the others. In the paper clients merge by themselves and receive only the last stack. Here the
message of round t has the size of t - 1 stacks, but at most twice the size of the dense matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfm import seeds
from fedfm.core.capabilities import Traits
from fedfm.core.client import Client, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.linalg.params import Layout, Params
from fedfm.methods._lora_products import Merged, Merging, add, as_factors, average, delta_w, terms
from fedfm.models.adapters import lora
from fedfm.training import any_rank


@dataclass(frozen=True)
class FLoRA(Merging):
    """Clients' adapters are stacked, which is exact for any ranks, and merged into the frozen weights each round."""

    traits: ClassVar[Traits] = Traits(rows_by_optimiser=True)

    def step(self, fed: Federation, state: Merged, t: int) -> Merged:
        r = self.ranks_of(fed)
        head, restart = state.w.only(lora.rest(state.w)), fed.seed_for("restart")
        starts = {k: fresh(fed.initial.layout, head, r[k], restart) for k in fed.sample(self.fraction)}
        rank = each({k: r[k] for k in starts})
        found = terms(fed, self.train, starts, head=head, shift=state.shift, rank=rank, restart=restart)
        dW = delta_w(found, state.alpha)  # B = [p_k s_k B_k]_k, A = [A_k]_k: rank sum_k r_k
        W = add(state.shift, dW)  # W <- W + B A
        return Merged(state.w.replace(average(found, list(head))), W, state.alpha)

    @on_client
    def train(self, client: Client, head: Params, shift: Params, rank: int, restart: int) -> Update:
        w = fresh(client.model.layout, head, rank, restart)  # A_k random, B_k = 0
        with lora.shift_weights(client.model, as_factors(shift)):
            w_k = any_rank.fit(self.local, client, w)
        return Update(w_k - w, self.weight(client), client.metrics)


def fresh(layout: Layout, head: Params, rank: int, seed: int) -> Params:
    """An untrained adapter of this rank: A uniform in +-1/sqrt(d_in), as in PEFT, and B = 0.

    With the same seed, the A of a smaller rank consists of the first rows of the A of a larger rank, for each expert.
    """
    at, found = lora.layout_at(layout, rank), {}
    a = {name for name, _ in lora.pairs(layout.slots).values()}
    for name, dtype, shape in at.entries:
        if name in a:
            *experts, r, d_in = shape
            drawn = seeds.generator(seed, name).uniform(-1, 1, (r, *experts, d_in)) / math.sqrt(d_in)
            found[name] = torch.from_numpy(drawn.swapaxes(0, -2).copy()).to(dtype)
        else:
            found[name] = head[name] if name in head else torch.zeros(shape, dtype=dtype)
    return Params(found)
