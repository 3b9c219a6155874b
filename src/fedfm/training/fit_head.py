"""Fit a head to features: softmax regression to convergence, on blocks of rows.

The fit runs in float64 (:mod:`fedfm.training.newton`) and returns a float32 head. Up to 128 MiB of rows in float64 stay
in memory. More rows are read again at each pass, a piece at a time, so that memory does not grow with their number
(except with Adam). Features are standardised, so that l2 does not depend on their units; the returned head includes
their means and scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedfm.core.fields import setting
from fedfm.training.local_job import mini_batches
from fedfm.training.newton import Blocks, Optimum, Problem, optimum

Missed = Callable[[Optimum], None]
_PIECE = 4096  # rows that are multiplied at once
_HELD = 1 << 24  # largest number of float64 values in memory (128 MiB); more rows are converted again in each pass
NOBODY = -1e4  # the logit of a class without rows: never the largest, but finite, because messages have no infinity


@dataclass(frozen=True)
class HeadSpec:
    """The [method.head] table: how a head is trained."""

    optimizer: str = setting(
        "newton",
        "newton (to convergence; lbfgs means the same) or adam (as in the papers)",
        choices=("newton", "lbfgs", "adam"),
    )
    l2: float = setting(1e-4, "weight of ||W||^2 / 2 on standardised features", ge=0, finite=True)
    iterations: int = setting(200, "largest number of Newton steps", ge=1)
    learning_rate: float = setting(1e-4, "learning rate of adam", gt=0, finite=True)
    epochs: int = setting(100, "epochs of adam", ge=1)
    batch_size: int = setting(64, "batch size of adam", ge=1)


def fit(
    blocks: Blocks, classes: int, dim: int, spec: HeadSpec = HeadSpec(), seed: int = 0, missed: Missed | None = None
) -> tuple[Tensor, Tensor]:
    """The head (W (C, d), b (C,)) that minimises the mean cross-entropy over all rows plus l2/2 ||W||^2.

    A class without a row gets zero weights and the bias :data:`NOBODY`.

    Args:
        seed: seed of the mini-batches' order (adam only).
        missed: called with the result of a search that did not converge.

    Raises:
        ValueError: there are no rows.
    """
    count, mean, present = _moments(blocks, classes, dim)
    if not count:
        raise ValueError("a head cannot be trained without rows")
    if spec.optimizer == "adam":
        w, b = _adam(blocks, classes, dim, spec, seed)
    else:
        w, b = torch.zeros(classes, dim, dtype=torch.float64), torch.zeros(classes, dtype=torch.float64)
        if int(present.sum()) > 1:
            w[present], b[present] = _newton(blocks, count, mean, present, spec, missed)
    w[~present], b[~present] = 0.0, NOBODY
    return w.float(), b.float()


def _newton(
    blocks: Blocks, count: int, mean: Tensor, present: Tensor, spec: HeadSpec, missed: Missed | None
) -> tuple[Tensor, Tensor]:
    """W and b of the classes that occur, on the unscaled features."""
    place = present.cumsum(0) - 1  # index of a class among the occurring ones

    def rows() -> Iterator[tuple[Tensor, Tensor]]:
        return _pieces(blocks, mean, place)

    basis, spread = _basis(rows, count, mean)
    classes = int(present.sum())
    if count * basis.shape[1] <= _HELD:
        held = [(x @ basis, y) for x, y in rows()]
        problem = Problem(lambda: held, count, classes, None, spread, spec.l2)
    else:
        problem = Problem(rows, count, classes, basis, spread, spec.l2)
    found = optimum(problem, spec.iterations)
    if missed is not None and not found.converged:
        missed(found)
    w = found.weight @ basis.T
    return w, found.bias - w @ mean


def _moments(blocks: Blocks, classes: int, dim: int) -> tuple[int, Tensor, Tensor]:
    """(number of rows, mean (d,) in float64, whether each class occurs (C,))."""
    count, total = 0, torch.zeros(dim, dtype=torch.float64)
    present = torch.zeros(classes, dtype=torch.bool)
    for x, y in blocks():
        count, total = count + len(x), total + x.sum(0, dtype=torch.float64)
        present[y] = True
    return count, total / max(count, 1), present


def _pieces(blocks: Blocks, mean: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The centred rows in float64, in pieces that fit the cache."""
    waiting: list[tuple[Tensor, Tensor]] = []
    for block in blocks():
        for start in range(0, len(block[1]), _PIECE):
            x, y = (part[start : start + _PIECE] for part in block)
            if waiting and sum(len(w[1]) for w in waiting) + len(y) > _PIECE:
                yield _piece(waiting, mean, place)
                waiting = []
            waiting.append((x, y))
    if waiting:
        yield _piece(waiting, mean, place)


def _piece(parts: Sequence[tuple[Tensor, Tensor]], mean: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    x, y = parts[0] if len(parts) == 1 else (torch.cat(of) for of in zip(*parts, strict=True))
    return x.double() - mean, place[y]


def _basis(rows: Blocks, count: int, mean: Tensor) -> tuple[Tensor, Tensor]:
    """A map (d, r) of centred rows to uncorrelated coordinates of standardised rows, and variances (r,) of these.

    The map is orthogonal on standardised features, so it keeps ||W||^2. If n < d the rows span r = n dimensions; the
    optimum is zero outside of them.
    """
    if count <= len(mean):
        x = torch.cat([x for x, _ in rows()])
        scale = _scale(x.square().mean(0), mean)
        q, r = torch.linalg.qr((x * scale).T)  # (d, n), (n, n)
        spread, turn = torch.linalg.eigh(r @ r.T / count)
        turn = q @ turn
    else:
        second = torch.zeros(len(mean), len(mean), dtype=torch.float64)
        for x, _ in rows():
            second += x.T @ x
        scale = _scale(second.diagonal() / count, mean)
        spread, turn = torch.linalg.eigh(second / count * scale * scale[:, None])
    return scale[:, None] * turn, spread.clamp_min(0)


def _scale(variance: Tensor, mean: Tensor) -> Tensor:
    """1 / standard deviation (d,); 1 for a feature that is constant up to float32 rounding."""
    std = variance.sqrt()
    return torch.where(std > 1e-7 * mean.abs(), 1 / std, 1.0)


def _adam(blocks: Blocks, classes: int, dim: int, spec: HeadSpec, seed: int) -> tuple[Tensor, Tensor]:
    """Adam from zero on the unscaled features. All rows are in memory, since any rows can form a mini-batch."""
    x, y = (torch.cat(parts) for parts in zip(*blocks(), strict=True))
    w, b = torch.zeros(classes, dim, requires_grad=True), torch.zeros(classes, requires_grad=True)
    groups: list[dict[str, Any]] = [{"params": [w], "weight_decay": spec.l2}, {"params": [b]}]
    optimiser = torch.optim.Adam(groups, lr=spec.learning_rate)
    for index in map(torch.from_numpy, mini_batches(len(x), spec.batch_size, spec.epochs, seed)):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(torch.addmm(b, x[index], w.T), y[index])
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return w.detach().double(), b.detach().double()


def fit_rows(
    x: Tensor, y: Tensor, classes: int, spec: HeadSpec = HeadSpec(), seed: int = 0, missed: Missed | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`fit` on rows in memory."""
    return fit(lambda: [(x, y)], classes, x.shape[1], spec, seed, missed)
