"""Softmax regression to convergence, on rows that come in blocks: what trains a head from features.

The fit is in float64 (:mod:`fedfm.training.newton`), the head that is returned float32. Up to 128 MiB of rows in
float64 are held; more are visited again at every pass, a piece at a time, so that memory does not grow with their
number (but for Adam). Features are standardised, and the means and scales folded into the head that is returned: l2
means the same whatever the features' units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedfm import seeds
from fedfm.core.fields import setting
from fedfm.training.newton import Blocks, Optimum, Problem, optimum

Told = Callable[[Optimum], None]
_PIECE = 4096  # rows that are computed with at a time
_HELD = 1 << 24  # numbers in float64 that are held, 128 MiB; more are converted again at every pass
NOBODY = -1e4  # the logit of a class that nobody has sent: finite, since messages must be, and never the largest


@dataclass(frozen=True)
class HeadSpec:
    """The [method.head] table: how a head is trained."""

    optimizer: str = setting(
        "newton",
        "newton (to convergence; lbfgs means the same) or adam (the paper's)",
        choices=("newton", "lbfgs", "adam"),
    )
    l2: float = setting(1e-4, "weight of ||W||^2 / 2 on standardised features", ge=0, finite=True)
    iterations: int = setting(200, "of newton at most", ge=1)
    learning_rate: float = setting(1e-4, "adam's", gt=0, finite=True)
    epochs: int = setting(100, "adam's", ge=1)
    batch_size: int = setting(64, "adam's", ge=1)


def _nobody(found: Optimum) -> None:
    """Is told, and says nothing."""


def fit(
    blocks: Blocks,
    classes: int,
    dim: int,
    spec: HeadSpec = HeadSpec(),
    seed: int = 0,
    told: Told = _nobody,
) -> tuple[Tensor, Tensor]:
    """The head (W (C, d), b (C,)) of least mean cross-entropy over all blocks' rows, plus l2/2 ||W||^2.

    A class without a row gets weights of zero and the bias :data:`NOBODY`.

    Args:
        seed: of the mini-batches' order (adam only).
        told: called with what the search has reached, where that is not the optimum.

    Raises:
        ValueError: no rows at all.
    """
    count, mean, present = _moments(blocks, classes, dim)
    if not count:
        raise ValueError("a head cannot be trained on no rows")
    if spec.optimizer == "adam":
        w, b = _adam(blocks, classes, dim, spec, seed)
    else:
        w, b = torch.zeros(classes, dim, dtype=torch.float64), torch.zeros(classes, dtype=torch.float64)
        if int(present.sum()) > 1:
            w[present], b[present] = _newton(blocks, count, mean, present, spec, told)
    w[~present], b[~present] = 0.0, NOBODY
    return w.float(), b.float()


def _newton(
    blocks: Blocks, count: int, mean: Tensor, present: Tensor, spec: HeadSpec, told: Told
) -> tuple[Tensor, Tensor]:
    """W and b of the classes that occur, on the features as they are; only they take part."""
    place = present.cumsum(0) - 1  # of a class among those that occur

    def rows() -> Iterator[tuple[Tensor, Tensor]]:
        return _pieces(blocks, mean, place)

    basis, spread = _basis(rows, count, mean)
    if count * basis.shape[1] <= _HELD:
        held = [(x @ basis, y) for x, y in rows()]
        problem = Problem(lambda: held, count, int(present.sum()), None, spread, spec.l2)
    else:
        problem = Problem(rows, count, int(present.sum()), basis, spread, spec.l2)
    found = optimum(problem, spec.iterations)
    if not found.converged:
        told(found)
    w = found.weight @ basis.T
    return w, found.bias - w @ mean


def _moments(blocks: Blocks, classes: int, dim: int) -> tuple[int, Tensor, Tensor]:
    """(rows, mean (d,) in float64, which classes occur (C,))."""
    count, total = 0, torch.zeros(dim, dtype=torch.float64)
    present = torch.zeros(classes, dtype=torch.bool)
    for x, y in blocks():
        count, total = count + len(x), total + x.sum(0, dtype=torch.float64)
        present[y] = True
    return count, total / max(count, 1), present


def _pieces(blocks: Blocks, mean: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows less their mean in float64, so many at a time that a piece stays in the cache and costs no memory."""
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
    """(d, r) that takes centred rows to uncorrelated coordinates of the standardised ones, and their variances (r,).

    It is orthogonal on standardised features: ||W||^2 stays what it is. Fewer rows than features span r = n dimensions,
    outside of which the optimum is zero.
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
    """1 / standard deviation (d,); 1 of a feature that is constant but for float32's rounding."""
    std = variance.sqrt()
    return torch.where(std > 1e-7 * mean.abs(), 1 / std, 1.0)


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


def fit_rows(
    x: Tensor, y: Tensor, classes: int, spec: HeadSpec = HeadSpec(), seed: int = 0, told: Told = _nobody
) -> tuple[Tensor, Tensor]:
    """:func:`fit` on rows that are in memory."""
    return fit(lambda: [(x, y)], classes, x.shape[1], spec, seed, told)
