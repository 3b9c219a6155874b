"""Elementwise update rules of the optimisers, on the flat vector (P,) of a client or the vectors (K, P) of a cohort."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedfm.linalg.params import Layout
from fedfm.training.optimisers import SGD, AdamW, Adaptive, Local

PIECE = 1 << 20  # entries that Adam updates at once, since its square roots need memory


def places(layout: Layout, names: Iterable[str]) -> list[slice]:
    """The slices of these tensors in the float32 vector (P,) of a layout."""
    return [slice(*layout.slots[name][1:3]) for name in names]


class Rule:
    """The optimiser's state for vectors of one shape; ``step`` updates such vectors in place, at the rate ``eta``.

    Args:
        no_weight_decay: slices of biases and norms in a vector (P,); they get weight decay only if all entries do.
    """

    def __init__(self, local: Local, like: Tensor, no_weight_decay: Sequence[slice] = ()) -> None:
        self.local, self.t, self.eta = local, 0, local.learning_rate
        self.decay: Tensor | None = None  # (P,), weight decay of each entry; None: the same for all entries
        if no_weight_decay and local.spares_biases:
            self.decay = like.new_full(like.shape[-1:], local.weight_decay)
            for place in no_weight_decay:
                self.decay[place] = 0
        self.momentum = local.momentum if isinstance(local, SGD) else 0.0
        self.adam = local if isinstance(local, Adaptive) else None
        self.m = torch.zeros_like(like) if self.adam or self.momentum else None
        self.v = torch.zeros_like(like) if self.adam else None

    def narrow(self, count: int) -> None:
        """Keep the state of the first ``count`` clients; the other clients have no batches left."""
        if self.m is not None:
            self.m = self.m[:count]
        if self.v is not None:
            self.v = self.v[:count]

    def step(self, p: Tensor, g: Tensor) -> None:
        """Update p in place to p - eta * direction(g); ``g`` is overwritten."""
        self.t += 1
        size = PIECE if p.is_cuda else PIECE >> 2  # multiples of the SIMD width; each piece starts kernels on a GPU
        if self.adam is None or p.numel() <= size or not (p.is_contiguous() and g.is_contiguous()):
            self._step(p, g, self.m, self.v, self.decay)
            return
        assert self.m is not None
        assert self.v is not None
        rows = p.dim() == 2 and self.decay is not None  # all clients of a cohort have the same slices without decay
        for row in range(len(p)) if rows else [...]:
            flats: list[Any] = [None if x is None else x[row].view(-1) for x in (p, g, self.m, self.v)]
            flats.append(self.decay)
            for at in range(0, len(flats[0]), size):
                pieces: list[Any] = [None if x is None else x[at : at + size] for x in flats]
                self._step(*pieces)

    def step_by(self, p: Tensor, gradients: Iterable[tuple[slice, Tensor]]) -> None:
        """One step on a vector (P,), from pieces (slice, gradient) of :data:`PIECE` entries; the last piece may be
        shorter.
        """
        self.t += 1
        for at, g in gradients:
            m, v, decay = (None if x is None else x[at] for x in (self.m, self.v, self.decay))
            self._step(p[at], g, m, v, decay)

    def _step(self, p: Tensor, g: Tensor, m: Tensor | None, v: Tensor | None, decays: Tensor | None) -> None:
        eta, decay = self.eta, self.local.weight_decay
        if decays is not None and isinstance(self.local, AdamW):
            p.mul_(1 - eta * decays)
        elif decays is not None:
            g.addcmul_(decays, p)
        elif decay and isinstance(self.local, AdamW):
            p.mul_(1 - eta * decay)
        elif decay:
            g.add_(p, alpha=decay)
        if self.adam is None:
            if m is not None:
                # PyTorch's momentum starts at the first gradient. The same recursion from m = 0 gives the same values.
                g = m.mul_(self.momentum).add_(g)
            p.add_(g, alpha=-eta)
            return
        assert m is not None
        assert v is not None
        beta_1, beta_2 = self.adam.betas
        m.lerp_(g, 1 - beta_1)
        v.mul_(beta_2).addcmul_(g, g, value=1 - beta_2)
        scale = math.sqrt(1 - beta_2**self.t)
        denominator = v.sqrt().div_(scale).add_(self.adam.epsilon)
        p.addcdiv_(m, denominator, value=-eta / (1 - beta_1**self.t))
