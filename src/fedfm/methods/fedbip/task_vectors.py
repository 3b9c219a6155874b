"""Task vectors of LoRA and of everything else: inner products and mixtures, of A and B as they are or of what they add.

tau_i = theta_i - theta_bar_i. In the space of products an adapted module's part of it is s (B_i A_i - B_bar_i A_bar_i)
= [s B_i, -s B_bar_i][A_i; A_bar_i], never made dense: ranks may differ by client, and LoRA's own freedom (B A is
(B R)(R^-1 A) for every R) does not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedfm.linalg import low_rank
from fedfm.linalg.low_rank import Factors
from fedfm.linalg.out_of_core import shelved
from fedfm.linalg.pairwise import gram, mix
from fedfm.linalg.params import Params
from fedfm.models.adapters import lora
from fedfm.models.layers import layers
from fedfm.models.model import Model


class Change(NamedTuple):
    """A client's last local pass: tau = theta - theta_bar, and theta."""

    tau: Params
    theta: Params


class Entries:
    """Vectors as their entries are.

    Attributes:
        layers: layer -> names of its tensors.
        statistics: what travels and is not trained, e.g. batch norm's.
    """

    def __init__(self, model: Model, granularity: str) -> None:
        self.layers = layers(model, granularity)
        trained = model.live()
        self.statistics = [n for n, dtype, _ in model.layout.entries if n not in trained and dtype.is_floating_point]

    def gram(self, x: Sequence[Change], whole: bool = False, centre: bool = False) -> np.ndarray:
        """Inner products (L, K, K) of task vectors.

        Args:
            whole: of the parameters theta instead.
            centre: of each vector less the mean of its layer's entries (Pearson).
        """
        return gram([c.theta if whole else c.tau for c in x], list(self.layers.values()), centre=centre)

    def mix(
        self, p: np.ndarray, x: Sequence[Change], onto: Sequence[Params], whole: bool = False
    ) -> tuple[list[Params], float]:
        """(onto_i + sum_k p_ik tau_k, or ``whole``: sum_k p_ik theta_k; the share of it that was cut off: none).

        Args:
            p: (L, M, K).
            onto: M vectors; what belongs to no layer is theirs.
        """
        if whole:
            return mix(p, [c.theta for c in x], list(self.layers.values()), shelved(0.0 * w for w in onto)), 0.0
        return mix(p, [c.tau for c in x], list(self.layers.values()), onto), 0.0

    def aggregates(
        self, p: np.ndarray, x: Sequence[Change], onto: Sequence[Params], whole: bool = False
    ) -> tuple[list[Params], float]:
        """As :meth:`mix`; statistics, which are no task vectors, as the clients' means: |p| is a weight of each."""
        found, cut = self.mix(p, x, onto, whole)
        if self.statistics:
            q = np.abs(p).mean(0, keepdims=True)
            means = mix(q / q.sum(2, keepdims=True), [c.theta.only(self.statistics) for c in x])
            found = shelved(w.replace(mean) for w, mean in zip(found, means, strict=True))
        return found, cut


@dataclass(frozen=True)
class _Layer:
    """Adapted modules of a layer, and its other tensors."""

    paths: tuple[str, ...]
    plain: tuple[str, ...]


class Products(Entries):
    """Vectors as what LoRA adds to the weights, (alpha / r) B A, beside the tensors that are not LoRA's.

    Raises:
        InputError: the model is not adapted by LoRA on linear maps.
    """

    def __init__(self, model: Model, granularity: str) -> None:
        super().__init__(model, granularity)
        lora.need(model)
        self.alpha, pairs = lora.alpha_of(model), lora.pairs(model.names)
        owner = {name: path for path, pair in pairs.items() for name in pair}
        self._pairs = pairs
        self._layers = [
            _Layer(
                tuple(dict.fromkeys(owner[n] for n in names if n in owner)), tuple(n for n in names if n not in owner)
            )
            for names in self.layers.values()
        ]

    def gram(self, x: Sequence[Change], whole: bool = False, centre: bool = False) -> np.ndarray:
        """As :class:`Entries`, O(K^2 r^2 d) a module; in memory are all clients' factors of one."""
        found = []
        for layer in self._layers:
            G, total, count = np.zeros((len(x), len(x))), np.zeros(len(x)), 0
            for path in layer.paths:
                changes = self._changes(path, x, whole)
                G += low_rank.inners(changes).numpy()
                total += [float(u.sum(0) @ v.sum(1)) for u, v in changes]
                u, v = changes[0]
                count += len(u) * v.shape[1]
            if layer.plain:
                plain = shelved((c.theta if whole else c.tau).only(layer.plain) for c in x)
                G += gram(plain)[0]
                total += [sum(float(t.double().sum()) for t in w.values()) for w in plain]
                count += sum(t.numel() for t in plain[0].values())
            found.append(G - np.outer(total, total) / count if centre else G)
        return np.stack(found)

    def mix(
        self, p: np.ndarray, x: Sequence[Change], onto: Sequence[Params], whole: bool = False
    ) -> tuple[list[Params], float]:
        """As :class:`Entries`, each module's sum cut to the rank of onto_i: the closest there is (Eckart, Young)."""
        found, lost, all_of_it = shelved(map(Params, onto)), 0.0, 0.0  # copies, to be written to
        for weights, layer in zip(p, self._layers, strict=True):
            for path in layer.paths:
                a, b = self._pairs[path]
                changes = self._changes(path, x, whole)
                for out, base, row in zip(found, onto, weights, strict=True):
                    terms = [] if whole else [(1.0, self._factors(path, base))]
                    terms += [(float(c), change) for c, change in zip(row, changes, strict=True) if c]
                    rank = len(out[a])
                    cut, sigma = low_rank.truncate(low_rank.compressed(low_rank.stack(terms)), rank)
                    u, v = low_rank.padded(cut, rank)
                    out[b].copy_(rank / self.alpha * u)
                    out[a].copy_(v)
                    lost += float((sigma[rank:] ** 2).sum())
                    all_of_it += float((sigma**2).sum())
            if layer.plain:
                plain = shelved((c.theta if whole else c.tau).only(layer.plain) for c in x)
                under = None if whole else shelved(w.only(layer.plain) for w in onto)
                for out, mixed in zip(found, mix(weights[None], plain, None, under), strict=True):
                    for name in layer.plain:
                        out[name].copy_(mixed[name])
        return found, float(np.sqrt(lost / all_of_it)) if all_of_it else 0.0

    def _changes(self, path: str, x: Sequence[Change], whole: bool) -> list[Factors]:
        """Of one module: factors of what each theta adds, less what its start added."""
        ends = [self._factors(path, c.theta) for c in x]
        if whole:
            return ends
        starts = [self._factors(path, {n: c.theta[n] - c.tau[n] for n in self._pairs[path]}) for c in x]
        return [low_rank.stack([(1.0, end), (-1.0, start)]) for end, start in zip(ends, starts, strict=True)]

    def _factors(self, path: str, w: Mapping[str, Tensor]) -> Factors:
        return lora.factors({n: w[n] for n in self._pairs[path]}, self.alpha)[path]
