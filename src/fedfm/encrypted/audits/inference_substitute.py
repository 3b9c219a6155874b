"""Train a substitute for a model from the model's states (block outputs).

BlindFed's clients (arXiv:2502.01289) have states of their rows. This allows two attacks. With the states of all tokens
before and after a block, a client fits that block. With only the disclosed activations, a client trains a complete
student that computes these activations from pixels.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, BATCH, RATE = 400, 64, 2e-3


class SurrogateBlock(nn.Module):
    """A pre-norm transformer block on states (n, T, d) without polynomials; the attacker assumes its size."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.inner, self.outer = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block: (n, T, d) -> (n, T, d)."""
        n, tokens, dim = x.shape
        q, k, v = self.inner(self.norms[0](x)).view(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, dim)
        x = x + self.outer(mixed)
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class Student(nn.Module):
    """A transformer from patches (n, T, F) to the states of its L blocks (n, L, T, d)."""

    def __init__(self, tokens: int, patch: int, levels: int, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Linear(patch, dim)
        self.place = nn.Parameter(0.02 * torch.randn(tokens, dim))
        self.blocks = nn.ModuleList([SurrogateBlock(dim, heads, hidden) for _ in range(levels)])

    def forward(self, patches: Tensor) -> Tensor:
        """Compute the states of all blocks: (n, T, F) -> (n, L, T, d)."""
        x, states = self.embed(patches) + self.place, []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return torch.stack(states, 1)


def fit_block(before: Tensor, after: Tensor, heads: int, hidden: int, seed: int, steps: int = STEPS) -> nn.Module:
    """Fit a block that maps states ``before`` (n, T, d) to states ``after``.

    The fit minimises the squared error of the block's update (output minus input), in float32.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = SurrogateBlock(before.shape[-1], heads, hidden)
        scale = (after - before).std()
        return _fit(net, before, lambda out, x, i: ((out - after[i]) / scale).square().mean(), steps)


def fit_student(
    patches: Tensor, released: Tensor, read: nn.Module, *, heads: int, hidden: int, dim: int, seed: int, steps: int
) -> nn.Module:
    """Train a student whose states approximate the disclosed states.

    Args:
        patches: (n, T, F).
        released: (n, L, P, d), the disclosed states.
        read: maps the student's states (n, L, T, d) to the form of the disclosed states (n, L, P, d), e.g. by the mean
            over tokens.
        dim: width of the student's blocks.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Student(patches.shape[1], patches.shape[2], released.shape[1], dim, heads, hidden)
        scale = released.std((0, 2, 3), keepdim=True)
        return _fit(
            net, patches, lambda out, x, i: ((read(out) - released[i]) / scale).square().mean(), steps
        )  # fmt: skip


def update_error(block: nn.Module, before: Tensor, after: Tensor) -> float:
    """Return the relative squared error of a block's update (output minus input).

    The error is 0 for a copy of the true block, and 1 for a block whose output equals its input.
    """
    with torch.no_grad():
        wrong = (block(before) - after).square().sum()
    return float(wrong / (after - before).square().sum())


def likeness(true: Tensor, guess: Tensor) -> float:
    """Return the mean cosine between two sets of features (n, d), after each set is centred."""
    a, b = (x.double() - x.double().mean(0) for x in (true, guess))
    return float(F.cosine_similarity(a, b, dim=1).mean())


def agreement(fit: tuple[Tensor, Tensor], true: Tensor, guess: Tensor, classes: int) -> float:
    """Return the fraction of rows to which a ridge classifier gives the same class from true and substitute features.

    Args:
        fit: true features (m, d) and labels (m,), to which the classifier is fitted.
    """
    x, y = fit[0].double().numpy(), np.eye(classes)[fit[1].numpy()]
    middle, spread = x.mean(0), x.std(0) + 1e-12
    x = (x - middle) / spread
    beta = np.linalg.solve(x.T @ x + 1e-2 * len(x) * np.eye(x.shape[1]), x.T @ (y - y.mean(0)))
    says = [(((z.double().numpy() - middle) / spread) @ beta + y.mean(0)).argmax(1) for z in (true, guess)]
    return float((says[0] == says[1]).mean())


def _fit(net: nn.Module, x: Tensor, loss: object, steps: int) -> nn.Module:
    """Train with Adam and a cosine schedule. The final weights are the average over the last quarter of the steps."""
    optimiser = torch.optim.Adam(net.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    averaged, since = copy.deepcopy(net), steps - steps // 4
    for step in range(steps):
        i = torch.randint(len(x), (min(BATCH, len(x)),))
        optimiser.zero_grad()
        torch.autograd.backward(loss(net(x[i]), x, i))  # type: ignore[operator]
        optimiser.step()
        schedule.step()
        if step >= since:
            with torch.no_grad():
                for a, b in zip(averaged.parameters(), net.parameters(), strict=True):
                    a.lerp_(b, 1 / (step - since + 1))
    return averaged.eval()
