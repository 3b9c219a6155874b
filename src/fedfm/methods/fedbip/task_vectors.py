"""Inner products and mixtures of task vectors, either of their entries or of LoRA's products.

A task vector is tau_i = theta_i - theta_bar_i. As a product, its part for an adapted module is
s (B_i A_i - B_bar_i A_bar_i) = [s B_i, -s B_bar_i][A_i; A_bar_i]. The dense matrix is never computed. Ranks may differ
by client, and LoRA's ambiguity (B A is (B R)(R^-1 A) for every R) has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedfm.linalg import low_rank
from fedfm.linalg.low_rank import Factors
from fedfm.linalg.out_of_core import keep_all
from fedfm.linalg.pairwise import gram, mix
from fedfm.linalg.params import Params
from fedfm.models.adapters import lora
from fedfm.models.layers import layers
from fedfm.models.model import Model


class Change(NamedTuple):
    """The result of a client's last local training: its task vector theta - theta_bar, and theta."""

    tau: Params
    theta: Params


class Entries:
    """Task vectors as vectors of their entries.

    Attributes:
        layers: the names of each layer's tensors, by layer.
        statistics: names of tensors that clients send but do not train, such as batch norm's running statistics.
    """

    def __init__(self, model: Model, granularity: str) -> None:
        self.layers = layers(model, granularity)
        trained = model.live()
        self.statistics = [n for n, dtype, _ in model.layout.entries if n not in trained and dtype.is_floating_point]

    def gram(self, x: Sequence[Change], whole: bool = False, centre: bool = False) -> np.ndarray:
        """Inner products (L, K, K) of task vectors.

        Args:
            whole: use the parameters theta instead of task vectors.
            centre: subtract from each vector the mean of its layer's entries (Pearson).
        """
        return gram([c.theta if whole else c.tau for c in x], list(self.layers.values()), centre=centre)

    def mix(
        self, p: np.ndarray, x: Sequence[Change], onto: Sequence[Params], whole: bool = False
    ) -> tuple[list[Params], float]:
        """onto_i + sum_k p_ik tau_k (if ``whole``, sum_k p_ik theta_k); and the truncated fraction, which is 0 here.

        Args:
            p: (L, M, K).
            onto: M vectors. The result keeps their entries that belong to no layer.
        """
        if whole:
            return mix(p, [c.theta for c in x], list(self.layers.values()), keep_all(0.0 * w for w in onto)), 0.0
        return mix(p, [c.tau for c in x], list(self.layers.values()), onto), 0.0

    def aggregates(
        self, p: np.ndarray, x: Sequence[Change], onto: Sequence[Params], whole: bool = False
    ) -> tuple[list[Params], float]:
        """As :meth:`mix`; statistics, which have no task vectors, become the clients' mean weighted by |p|."""
        found, cut = self.mix(p, x, onto, whole)
        if self.statistics:
            q = np.abs(p).mean(0, keepdims=True)
            means = mix(q / q.sum(2, keepdims=True), [c.theta.only(self.statistics) for c in x])
            found = keep_all(w.replace(mean) for w, mean in zip(found, means, strict=True))
        return found, cut


class Products(Entries):
    """Task vectors as LoRA's products (alpha / r) B A, and as entries for the tensors that are not LoRA's.

    Raises:
        InputError: the model is not adapted by LoRA on linear maps.
    """

    def __init__(self, model: Model, granularity: str) -> None:
        super().__init__(model, granularity)
        lora.need(model)
        self.alpha, self._pairs = lora.alpha_of(model), lora.pairs(model.names)
        owner = {name: path for path, pair in self._pairs.items() for name in pair}
        self._layers = [  # (paths of adapted modules, names of other tensors)
            (list(dict.fromkeys(owner[n] for n in names if n in owner)), [n for n in names if n not in owner])
            for names in self.layers.values()
        ]

    def gram(self, x: Sequence[Change], whole: bool = False, centre: bool = False) -> np.ndarray:
        """As in :class:`Entries`, in O(K^2 r^2 d) per module. Memory holds the factors of one module at a time."""
        found = []
        for paths, others in self._layers:
            G, total, count = np.zeros((len(x), len(x))), np.zeros(len(x)), 0
            for path in paths:
                changes = self._changes(path, x, whole)
                G += low_rank.inners(changes).numpy()
                total += [float(u.sum(0) @ v.sum(1)) for u, v in changes]
                u, v = changes[0]
                count += len(u) * v.shape[1]
            if others:
                plain = keep_all((c.theta if whole else c.tau).only(others) for c in x)
                G += gram(plain)[0]
                total += [sum(float(t.double().sum()) for t in w.values()) for w in plain]
                count += sum(t.numel() for t in plain[0].values())
            found.append(G - np.outer(total, total) / count if centre else G)
        return np.stack(found)

    def mix(
        self, p: np.ndarray, x: Sequence[Change], onto: Sequence[Params], whole: bool = False
    ) -> tuple[list[Params], float]:
        """As in :class:`Entries`; each module's sum is truncated to the rank of onto_i (Eckart and Young 1936)."""
        found, lost, energy = keep_all(map(Params, onto)), 0.0, 0.0  # copies, since they are overwritten
        for weights, (paths, others) in zip(p, self._layers, strict=True):
            for path in paths:
                a, b = self._pairs[path]
                changes = self._changes(path, x, whole)
                for out, base, row in zip(found, onto, weights, strict=True):
                    terms = [] if whole else [(1.0, self._factors(path, base))]
                    terms += [(float(c), change) for c, change in zip(row, changes, strict=True) if c]
                    rank = len(out[a])
                    cut, sigma = low_rank.truncate(low_rank.compress(low_rank.stack(terms)), rank)
                    u, v = low_rank.pad(cut, rank)
                    out[b].copy_(rank / self.alpha * u)
                    out[a].copy_(v)
                    lost += float((sigma[rank:] ** 2).sum())
                    energy += float((sigma**2).sum())
            if others:
                plain = keep_all((c.theta if whole else c.tau).only(others) for c in x)
                under = None if whole else keep_all(w.only(others) for w in onto)
                for out, mixed in zip(found, mix(weights[None], plain, None, under), strict=True):
                    for name in others:
                        out[name].copy_(mixed[name])
        return found, float(np.sqrt(lost / energy)) if energy else 0.0

    def _changes(self, path: str, x: Sequence[Change], whole: bool) -> list[Factors]:
        """Factors of s B A of one module for each theta; unless ``whole``, the start's product is subtracted."""
        ends = [self._factors(path, c.theta) for c in x]
        if whole:
            return ends
        starts = [self._factors(path, {n: c.theta[n] - c.tau[n] for n in self._pairs[path]}) for c in x]
        return [low_rank.stack([(1.0, end), (-1.0, start)]) for end, start in zip(ends, starts, strict=True)]

    def _factors(self, path: str, w: Mapping[str, Tensor]) -> Factors:
        return lora.factors({n: w[n] for n in self._pairs[path]}, self.alpha)[path]
