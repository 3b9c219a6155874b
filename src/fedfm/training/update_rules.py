"""The optimisers' update rules on flat vectors, one client (P,) or a cohort (K, P): the same elementwise operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedfm.training.optimisers import SGD, Adam, AdamW, Local

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # PyTorch's defaults


class Rule:
    """Holds the optimiser's state for vectors of one shape; ``step`` updates in place, as PyTorch's classes do."""

    def __init__(self, local: Local, like: Tensor) -> None:
        self.local, self.t = local, 0
        self.momentum = local.momentum if isinstance(local, SGD) else 0.0
        self.adam = isinstance(local, (Adam, AdamW))
        self.m = torch.zeros_like(like) if self.adam or self.momentum else None
        self.v = torch.zeros_like(like) if self.adam else None

    def narrow(self, count: int) -> None:
        """Go on with the first ``count`` rows only: the others have no batches left."""
        if self.m is not None:
            self.m = self.m[:count]
        if self.v is not None:
            self.v = self.v[:count]

    def step(self, p: Tensor, g: Tensor) -> None:
        """P <- p - eta * direction(g); ``g`` is overwritten."""
        eta, decay = self.local.learning_rate, self.local.weight_decay
        self.t += 1
        if decay and isinstance(self.local, AdamW):
            p.mul_(1 - eta * decay)
        elif decay:
            g.add_(p, alpha=decay)
        if not self.adam:
            if self.m is not None:
                # PyTorch's momentum starts at the first gradient; from m = 0 the same recursion gives it.
                g = self.m.mul_(self.momentum).add_(g)
            p.add_(g, alpha=-eta)
            return
        assert self.m is not None
        assert self.v is not None
        self.m.lerp_(g, 1 - BETA_1)
        self.v.mul_(BETA_2).addcmul_(g, g, value=1 - BETA_2)
        scale = math.sqrt(1 - BETA_2**self.t)
        denominator = (self.v.sqrt() / scale).add_(EPSILON)
        p.addcdiv_(self.m, denominator, value=-eta / (1 - BETA_1**self.t))
