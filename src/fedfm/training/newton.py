"""The optimum of a softmax regression in float64, by Newton's method with a check of convergence.

L(W, b) = 1/n sum_i -log p_i(y_i) + l2/2 ||W||^2, p_i = softmax(W z_i + b) over rows z_i (r,). If classes are separable,
the optimum is far from zero. The curvature there differs by orders of magnitude between directions, so first-order
methods would need thousands more steps. A Newton step solves H d = -g by conjugate gradients. Each of their products
H v has the cost of a gradient. If conjugate gradients converge slowly and H is small, H is computed and factorised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Blocks = Callable[[], Iterable[tuple[Tensor, Tensor]]]  # one call per pass: blocks (x (b, k) float64, y (b,) int64)

# The search has converged if both hold: the gradient's norm is below GRADIENT times the norm at zero, and the loss
# would fall by less than GAP times its value (half the squared Newton decrement estimates the fall).
GRADIENT = 1e-8
GAP = 1e-13
_ROUNDING = 1e-14  # a gradient norm below this counts as zero
_NOTHING = 1e-13  # nats; the search ends at this loss, since without l2 the loss of separable classes approaches 0
_KEPT = 1 << 24  # largest number of probabilities kept between passes: 128 MiB
_FACTORISED = 2048  # largest number of unknowns of a factorised Hessian: 32 MiB
_PRODUCTS = 1000  # largest number of products H v per step if H is not factorised


@dataclass(frozen=True)
class Optimum:
    """The result of the search.

    Attributes:
        weight: (C, r).
        bias: (C,); its sum is zero.
        gradient: norm of L's gradient, as a share of the norm at zero.
        iterations: number of Newton steps.
        converged: whether the result meets :data:`GRADIENT` and :data:`GAP`.
    """

    weight: Tensor
    bias: Tensor
    gradient: float
    iterations: int
    converged: bool


@dataclass(frozen=True)
class Problem:
    """Rows and labels of C classes. Every class has at least one row.

    Attributes:
        blocks: the rows, with k values each.
        basis: (k, r): z = x basis for rows x, so that the entries of z are uncorrelated; None: the rows are z.
        spread: (r,) mean of z^2.
    """

    blocks: Blocks
    rows: int
    classes: int
    basis: Tensor | None
    spread: Tensor
    l2: float


@dataclass(frozen=True)
class _Point:
    """L and its gradient at theta; theta and the gradient are (C, r + 1), with the bias in the last column."""

    theta: Tensor
    value: float
    gradient: Tensor
    curvature: Tensor  # (C,): mean of p (1 - p)
    kept: list[tuple[Tensor, Tensor]] | None  # of each block: p (b, C) and 1 - p(y) (b, 1)

    @property
    def norm(self) -> float:
        return float(self.gradient.norm())


def optimum(problem: Problem, iterations: int) -> Optimum:
    """The optimum from a start at zero, or the point after ``iterations`` steps."""
    search = _Search(problem)
    point = search.at(torch.zeros(problem.classes, len(problem.spread) + 1, dtype=torch.float64))
    start, step, done = point.norm, 0, False
    enough = GRADIENT * start + _ROUNDING
    while point.value > _NOTHING and not (done := point.norm == 0.0):
        direction = search.direction(point, start)
        slope = float((point.gradient * direction).sum())
        done = point.norm <= enough and -slope / 2 <= GAP * point.value
        if done or step == iterations or (further := search.descend(point, direction, slope)) is None:
            break
        point, step = further, step + 1
    return Optimum(point.theta[:, :-1], point.theta[:, -1], point.norm / max(start, _ROUNDING), step, done)


class _Search:
    """L of one problem, and descent steps."""

    def __init__(self, problem: Problem) -> None:
        self.p = problem
        self.spread = torch.cat([problem.spread, problem.spread.new_ones(1)])  # the bias is a feature that is always 1
        self.ridge = torch.full_like(self.spread, problem.l2)
        self.ridge[-1] = 0.0
        self.keeps = problem.rows * problem.classes <= _KEPT
        r, c = len(self.spread), problem.classes
        self.factorises = r * c <= _FACTORISED
        # Multiply-adds of H (n r^2 C (C + 1) / 2) and of its factor, divided by those of H v (2 n r C).
        products = r * (c + 1) // 4 + (r * c) ** 2 // (12 * problem.rows)
        self.most = max(products, 20) if self.factorises else _PRODUCTS

    def at(self, theta: Tensor) -> _Point:
        """L and its gradient."""
        value, gradient, curvature = 0.0, torch.zeros_like(theta), torch.zeros_like(theta[:, 0])
        kept: list[tuple[Tensor, Tensor]] = []
        inner = self._on_rows(theta)
        for x, y in self.p.blocks():
            p, rest, loss = _chances(x, y, *inner)
            value += float(loss.sum())
            curvature += (p * _complement(p, rest, y)).sum(0)
            error = p.scatter(1, y[:, None], -rest)  # p - 1 at the row's class: without cancellation
            self._add(gradient, error, x)
            if self.keeps:
                kept.append((p, rest))
        n = self.p.rows
        gradient = gradient / n + self.ridge * theta
        value = value / n + float((self.ridge * theta * theta).sum()) / 2
        return _Point(theta, value, gradient, curvature / n, kept if self.keeps else None)

    def direction(self, point: _Point, start: float) -> Tensor:
        """A step d (C, r + 1) with H d = -g, more exact near the optimum."""
        share = min(0.1, (point.norm / start) ** 0.5)
        found, solved = self._conjugate_gradients(point, share)
        if solved or not self.factorises:
            return found
        self.most = 0  # conjugate gradients would converge no faster in later steps
        return self._cholesky_step(point)

    def descend(self, point: _Point, direction: Tensor, slope: float) -> _Point | None:
        """The point after the first step of 1, 1/2, 1/4, ... that decreases L (Armijo's rule); None if none does."""
        step = 1.0
        while step > 1e-10:
            further = self.at(point.theta + step * direction)
            if further.value <= point.value * (1 + GAP) + 1e-4 * step * slope:
                return further
            step /= 2
        return None

    def _conjugate_gradients(self, point: _Point, share: float) -> tuple[Tensor, bool]:
        """(direction d, whether ||H d + g|| is at most ``share`` times ||g||, in the preconditioner's norm)."""
        scale = point.curvature[:, None] * self.spread + self.ridge
        scale = scale.clamp_min(1e-16 * float(scale.max()))
        found, r = torch.zeros_like(point.theta), -point.gradient
        z = _centre(r / scale)
        along, size = z, float((r * z).sum())
        enough = share**2 * size
        for _ in range(self.most):
            if size <= enough:
                return found, True
            curved = self._product(point, along)
            bend = float((along * curved).sum())
            if bend <= 0:  # only rounding is left
                return found, bool(found.any())
            found = found + size / bend * along
            r = r - size / bend * curved
            z = _centre(r / scale)
            size, before = float((r * z).sum()), size
            along = z + size / before * along
        return found, size <= enough

    def _product(self, point: _Point, v: Tensor) -> Tensor:
        """H v = 1/n sum_i p_i (u_i - p_i . u_i) z_i^T + l2 v with u_i = v z_i."""
        out = torch.zeros_like(v)
        weight, bias = self._on_rows(v)
        for x, y, p, _ in self._blocks(point):
            u = torch.addmm(bias, x, weight.T)
            u -= u.gather(1, y[:, None])  # avoids cancellation
            u -= (p * u).sum(1, keepdim=True)
            self._add(out, u.mul_(p), x)
        return out / self.p.rows + self.ridge * v

    def _cholesky_step(self, point: _Point) -> Tensor:
        """-H^-1 g by a Cholesky factorisation."""
        c, r = point.theta.shape
        h = torch.zeros(c, c, r, r, dtype=torch.float64)
        for x, y, p, rest in self._blocks(point):
            z = x if self.p.basis is None else x @ self.p.basis
            z = torch.cat([z, z.new_ones(len(z), 1)], 1)
            other = _complement(p, rest, y)
            for i in range(c):
                for j in range(i + 1):
                    share = p[:, i] * (other[:, i] if i == j else -p[:, j])
                    h[i, j] += (z * share[:, None]).T @ z
        h /= self.p.rows
        for i in range(c):
            h[i, i].diagonal().add_(self.ridge)
            for j in range(i):
                h[j, i] = h[i, j]
        # A shift of all classes changes no probability, so in this direction H and the gradient are 0. The next line
        # makes H regular there without changing the step.
        h += torch.diag(self.spread * float(point.curvature.mean()) / c)
        whole = h.permute(0, 2, 1, 3).reshape(c * r, c * r)
        size = float(whole.diagonal().mean())
        for more in (0.0, 1e-15, 1e-13, 1e-11):  # rounding may leave H indefinite
            whole.diagonal().add_(more * size)
            factor, failed = torch.linalg.cholesky_ex(whole)
            if not failed:
                d = torch.cholesky_solve(-point.gradient.reshape(-1, 1), factor).view(c, r)
                return _centre(d)
        return -point.gradient

    def _blocks(self, point: _Point) -> Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """(rows, labels, p, 1 - p(y)) of every block."""
        if point.kept is not None:
            for (x, y), (p, rest) in zip(self.p.blocks(), point.kept, strict=True):
                yield x, y, p, rest
        else:
            inner = self._on_rows(point.theta)
            for x, y in self.p.blocks():
                yield x, y, *_chances(x, y, *inner)[:2]

    def _on_rows(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Weight (C, k) and bias (C,) of theta for the rows of the blocks."""
        weight = theta[:, :-1]
        return (weight if self.p.basis is None else weight @ self.p.basis.T), theta[:, -1]

    def _add(self, total: Tensor, error: Tensor, x: Tensor) -> None:
        """Add error^T [z 1] to ``total`` (C, r + 1)."""
        inner = error.T @ x
        total[:, :-1] += inner if self.p.basis is None else inner @ self.p.basis
        total[:, -1] += error.sum(0)


def _chances(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(p (b, C), 1 - p(y) (b, 1), -log p(y) (b, 1)), with full precision even if p(y) is near 1."""
    logp = torch.log_softmax(torch.addmm(bias, x, weight.T), 1)
    own = y[:, None]
    loss = -logp.gather(1, own)
    p = logp.exp_()
    rest = p.scatter(1, own, 0.0).sum(1, keepdim=True)
    return p, rest, torch.where(rest < 0.5, -torch.log1p(-rest), loss)


def _complement(p: Tensor, rest: Tensor, y: Tensor) -> Tensor:
    """1 - p (b, C)."""
    return (1 - p).scatter(1, y[:, None], rest)


def _centre(v: Tensor) -> Tensor:
    """Subtract the mean over the classes, which changes no probability."""
    return v - v.mean(0)
