"""Softmax regression to convergence, on rows that come in blocks: what trains a head from features.

The rows are visited again at every evaluation of the loss and never held together (but for Adam), so memory does not
grow with their number. Features are standardised first, and the means and scales folded into the head that is returned:
without it gradient methods under-train a head on unit-norm features by tens of points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm import seeds
from fedfm.errors import InputError
from fedfm.threads import one_thread

Blocks = Callable[[], Iterable[tuple[Tensor, Tensor]]]  # called once a pass: (x (n, d) float32, y (n,) int64), ...
NOBODY = -1e4  # the logit of a class that nobody has sent: finite, since messages must be, and never the largest


@dataclass(frozen=True)
class HeadSpec:
    """The [method.head] table: how a head is trained."""

    optimizer: str = field(default="lbfgs", metadata={"help": "lbfgs (to convergence) or adam (the paper's)"})
    l2: float = field(default=1e-4, metadata={"help": "weight of ||W||^2 / 2 on standardised features"})
    iterations: int = field(default=200, metadata={"help": "of L-BFGS at most"})
    learning_rate: float = field(default=1e-4, metadata={"help": "adam's"})
    epochs: int = field(default=100, metadata={"help": "adam's"})
    batch_size: int = field(default=64, metadata={"help": "adam's"})

    def validate(self, where: str = "method.head") -> None:
        """Refuse values that make no sense, naming the key."""
        if self.optimizer not in ("lbfgs", "adam"):
            raise InputError(f'{where}.optimizer = "{self.optimizer}": expected "lbfgs" or "adam"')
        if not 0 <= self.l2 < math.inf:
            raise InputError(f"{where}.l2 = {self.l2}: expected a finite number of at least 0")
        for key in ("iterations", "learning_rate", "epochs", "batch_size"):
            if not 0 < getattr(self, key) < math.inf:
                raise InputError(f"{where}.{key} = {getattr(self, key)}: expected a finite number above 0")


def fit(blocks: Blocks, classes: int, dim: int, spec: HeadSpec = HeadSpec(), seed: int = 0) -> tuple[Tensor, Tensor]:
    """The head (W (C, d), b (C,)) of least mean cross-entropy over all blocks' rows, plus l2/2 ||W||^2.

    A class without a row gets weights of zero and the bias :data:`NOBODY`.

    Args:
        seed: of the mini-batches' order (adam only).

    Raises:
        ValueError: no rows at all.
    """
    count, mean, std, present = _moments(blocks, classes, dim)
    if not count:
        raise ValueError("a head cannot be trained on no rows")
    if spec.optimizer == "adam":
        w, b = _adam(blocks, classes, dim, spec, seed)
    else:
        w, b = _lbfgs(blocks, int(count), mean, std, present, spec)
        w = w / std
        b = b - w @ mean
    w[~present], b[~present] = 0.0, NOBODY
    return w.float(), b.float()


def _moments(blocks: Blocks, classes: int, dim: int) -> tuple[int, Tensor, Tensor, Tensor]:
    """(rows, mean (d,), standard deviation (d,), which classes occur (C,)), in float64."""
    count, total, square = 0, torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)
    present = torch.zeros(classes, dtype=torch.bool)
    for x, y in blocks():
        x = x.double()
        count, total, square = count + len(x), total + x.sum(0), square + (x * x).sum(0)
        present[y] = True
    mean = total / max(count, 1)
    variance = (square / max(count, 1) - mean**2).clamp_min(0)
    std = variance.sqrt()
    return count, mean, torch.where(std > 1e-6 * std.max().clamp_min(1e-12), std, torch.ones_like(std)), present


def _lbfgs(
    blocks: Blocks, count: int, mean: Tensor, std: Tensor, present: Tensor, spec: HeadSpec
) -> tuple[Tensor, Tensor]:
    """Weights on standardised features; only the classes that occur take part: the others' gradients are zero."""
    from scipy.optimize import minimize

    classes, dim = int(present.sum()), len(mean)
    place = present.cumsum(0) - 1  # of a class among those that occur
    shift, scale = mean.float(), 1 / std.float()

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        w, b = torch.from_numpy(flat[:-classes]).view(classes, dim), torch.from_numpy(flat[-classes:])
        w32, b32 = w.float(), b.float()
        total, gw, gb = 0.0, torch.zeros_like(w), torch.zeros_like(b)
        for x, y in blocks():
            x, y = (x - shift) * scale, place[y]
            logp = torch.log_softmax(torch.addmm(b32, x, w32.T), 1)
            total -= float(logp.gather(1, y[:, None]).double().sum())
            error = logp.exp_()
            error[torch.arange(len(y)), y] -= 1
            gw += error.T @ x
            gb += error.sum(0)
        value = total / count + spec.l2 / 2 * float((w * w).sum())
        gradient = torch.cat([(gw / count + spec.l2 * w).view(-1), gb / count])
        return value, gradient.numpy()

    options = {"maxiter": spec.iterations, "maxcor": 10, "ftol": 1e-9, "gtol": 1e-5}
    with one_thread():
        best = minimize(loss, np.zeros(classes * (dim + 1)), jac=True, method="L-BFGS-B", options=options).x
    found = torch.from_numpy(best)
    w, b = found.new_zeros(len(present), dim), found.new_zeros(len(present))
    w[present], b[present] = found[:-classes].view(classes, dim), found[-classes:]
    return w, b


def _adam(blocks: Blocks, classes: int, dim: int, spec: HeadSpec, seed: int) -> tuple[Tensor, Tensor]:
    """Adam from zero on the features as they are. Its mini-batches mix all rows, which are therefore held together."""
    x, y = (torch.cat(parts) for parts in zip(*blocks(), strict=True))
    w, b = torch.zeros(classes, dim, requires_grad=True), torch.zeros(classes, requires_grad=True)
    groups: list[dict[str, Any]] = [{"params": [w], "weight_decay": spec.l2}, {"params": [b]}]
    optimiser = torch.optim.Adam(groups, lr=spec.learning_rate)
    rng = seeds.generator(seed, "batches")
    for _ in range(spec.epochs):
        order = torch.from_numpy(rng.permutation(len(x)))
        for start in range(0, len(x), spec.batch_size):
            index = order[start : start + spec.batch_size]
            optimiser.zero_grad()
            loss = torch.nn.functional.cross_entropy(torch.addmm(b, x[index], w.T), y[index])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return w.detach().double(), b.detach().double()


def fit_rows(x: Tensor, y: Tensor, classes: int, spec: HeadSpec = HeadSpec(), seed: int = 0) -> tuple[Tensor, Tensor]:
    """:func:`fit` on rows that are in memory."""
    return fit(lambda: [(x, y)], classes, x.shape[1], spec, seed)
