"""Update rules of the optimisers on flat vectors, of one client (P,) or of a cohort (K, P), elementwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedfm.training.optimisers import SGD, AdamW, Adaptive, Local


class Rule:
    """The optimiser's state for vectors of one shape; ``step`` updates them in place, at the rate ``eta``."""

    def __init__(self, local: Local, like: Tensor) -> None:
        self.local, self.t, self.eta = local, 0, local.learning_rate
        self.momentum = local.momentum if isinstance(local, SGD) else 0.0
        self.adam = local if isinstance(local, Adaptive) else None
        self.m = torch.zeros_like(like) if self.adam or self.momentum else None
        self.v = torch.zeros_like(like) if self.adam else None

    def narrow(self, count: int) -> None:
        """Keep the state of the first ``count`` rows: the others have no batches left."""
        if self.m is not None:
            self.m = self.m[:count]
        if self.v is not None:
            self.v = self.v[:count]

    def step(self, p: Tensor, g: Tensor) -> None:
        """P <- p - eta * direction(g); ``g`` is overwritten."""
        eta, decay = self.eta, self.local.weight_decay
        self.t += 1
        if decay and isinstance(self.local, AdamW):
            p.mul_(1 - eta * decay)
        elif decay:
            g.add_(p, alpha=decay)
        if self.adam is None:
            if self.m is not None:
                # PyTorch's momentum starts at the first gradient; the same recursion from m = 0 gives it.
                g = self.m.mul_(self.momentum).add_(g)
            p.add_(g, alpha=-eta)
            return
        assert self.m is not None
        assert self.v is not None
        beta_1, beta_2 = self.adam.betas
        self.m.lerp_(g, 1 - beta_1)
        self.v.mul_(beta_2).addcmul_(g, g, value=1 - beta_2)
        scale = math.sqrt(1 - beta_2**self.t)
        denominator = (self.v.sqrt() / scale).add_(self.adam.epsilon)
        p.addcdiv_(self.m, denominator, value=-eta / (1 - beta_1**self.t))
