"""A substitute of a model whose states are seen: blocks fitted to pairs of states, or a student of the last ones.

BlindFed's clients (arXiv:2502.01289) hold the states of their rows. With the states of all tokens before and after a
block they fit that block. With the released states alone they train a complete student from pixels.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, BATCH, RATE = 400, 64, 2e-3


class SurrogateBlock(nn.Module):
    """A pre-norm transformer block with exact functions, of the shape that the attacker supposes: (n, T, d)."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.inner, self.outer = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, d) -> (n, T, d)."""
        n, tokens, dim = x.shape
        q, k, v = self.inner(self.norms[0](x)).view(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, tokens, dim)
        x = x + self.outer(mixed)
        out: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return out


class Student(nn.Module):
    """Patches (n, T, F) -> states of L blocks (n, L, T, d)."""

    def __init__(self, tokens: int, patch: int, levels: int, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Linear(patch, dim)
        self.place = nn.Parameter(0.02 * torch.randn(tokens, dim))
        self.blocks = nn.ModuleList([SurrogateBlock(dim, heads, hidden) for _ in range(levels)])

    def forward(self, patches: Tensor) -> Tensor:
        """(n, T, F) -> (n, L, T, d)."""
        x, states = self.embed(patches) + self.place, []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return torch.stack(states, 1)


def fit_block(before: Tensor, after: Tensor, heads: int, hidden: int, seed: int, steps: int = STEPS) -> nn.Module:
    """A block that maps states before (n, T, d) to those after, by least squares of the update, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = SurrogateBlock(before.shape[-1], heads, hidden)
        scale = (after - before).std()
        return _fit(net, before, lambda out, x, i: ((out - after[i]) / scale).square().mean(), steps)


def fit_student(
    patches: Tensor, released: Tensor, read: nn.Module, *, heads: int, hidden: int, dim: int, seed: int, steps: int
) -> nn.Module:
    """A student whose states, read as the released ones are, come close to them.

    Args:
        patches: (n, T, F).
        released: (n, L, P, d).
        read: states (n, L, T, d) -> (n, L, P, d), e.g. the mean over the tokens.
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
    """Squared error of the block's update over its square: 0 is a copy, 1 is no knowledge."""
    with torch.no_grad():
        wrong = (block(before) - after).square().sum()
    return float(wrong / (after - before).square().sum())


def likeness(true: Tensor, guess: Tensor) -> float:
    """Mean cosine of features (n, d), each set centred."""
    a, b = (x.double() - x.double().mean(0) for x in (true, guess))
    return float(F.cosine_similarity(a, b, dim=1).mean())


def agreement(fit: tuple[Tensor, Tensor], true: Tensor, guess: Tensor, classes: int) -> float:
    """Share of rows for which a ridge classifier, fitted to true features, says the same of the substitute's.

    Args:
        fit: true features (m, d) and labels (m,) that the classifier is fitted to.
    """
    x, y = fit[0].double().numpy(), np.eye(classes)[fit[1].numpy()]
    middle, spread = x.mean(0), x.std(0) + 1e-12
    x = (x - middle) / spread
    beta = np.linalg.solve(x.T @ x + 1e-2 * len(x) * np.eye(x.shape[1]), x.T @ (y - y.mean(0)))
    says = [(((z.double().numpy() - middle) / spread) @ beta + y.mean(0)).argmax(1) for z in (true, guess)]
    return float((says[0] == says[1]).mean())


def _fit(net: nn.Module, x: Tensor, loss: object, steps: int) -> nn.Module:
    """Adam with a cosine schedule; the weights are an average of the last quarter of the steps."""
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
