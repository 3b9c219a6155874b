"""Heads trained to convergence: scikit-learn's optimum of the loss, or a notice that it was not reached."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedfm.linalg.threads import torch_threads
from fedfm.training import fit_head
from fedfm.training.fit_head import NOBODY, HeadSpec, fit_rows
from fedfm.training.newton import Optimum


def made(n, d, c, apart, seed=0, units=None):
    """Gaussian classes of correlated features; the further apart, the more separable."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(c), rng.integers(0, c, n - c)])
    x = (rng.normal(size=(c, d)) * apart)[y] + rng.normal(size=(n, d))
    x = x @ (rng.normal(size=(d, d)) * np.geomspace(1, 0.02, d)) + rng.normal(size=d)
    return torch.from_numpy(x * (1 if units is None else units)).float(), torch.from_numpy(y)


CASES = {
    "easy": (made(400, 6, 4, 0.5), 1e-2),
    "usual": (made(400, 20, 5, 1.0), 1e-4),
    "separable": (made(300, 30, 5, 3.0), 1e-6),
    "units": (made(300, 12, 4, 1.0, units=np.geomspace(1e-3, 1e3, 12)), 1e-4),
    "few rows": (made(12, 40, 3, 1.0), 1e-3),
    "two classes": (made(200, 10, 2, 0.7), 1e-4),
}


def loss_of(x, y, w, b, l2):
    """Mean cross-entropy and penalty of a head (C, d) on standardised rows, in float64."""
    z = x.double() @ w.T + b
    return float(torch.nn.functional.cross_entropy(z, y) + l2 / 2 * w.square().sum())


def standardised(x):
    x = x.double()
    return (x - x.mean(0)) / x.std(0, unbiased=False), x.mean(0), x.std(0, unbiased=False)


def theirs(z, y, l2):
    """scikit-learn's multinomial optimum as (W (C, d), b (C,)); of two classes it has one vector, w_1 - w_0."""
    classes = len(y.unique())
    c = (2 if classes == 2 else 1) / (l2 * len(y))  # ||W||^2 = ||w_1 - w_0||^2 / 2
    found = LogisticRegression(C=c, tol=1e-12, max_iter=10000, solver="newton-cholesky").fit(z.numpy(), y.numpy())
    w, b = torch.from_numpy(found.coef_), torch.from_numpy(found.intercept_)
    if classes == 2:
        w, b = torch.cat([-w, w]) / 2, torch.cat([-b, b]) / 2
    return w - w.mean(0), b - b.mean()


@pytest.mark.parametrize("case", CASES)
def test_the_optimum_is_scikit_learns(case):
    (x, y), l2 = CASES[case]
    z, mean, std = standardised(x)
    missed = []
    w, b = fit_rows(x, y, int(y.max()) + 1, HeadSpec(l2=l2), missed=missed.append)
    assert not missed
    w, b = w.double(), b.double()
    w, b = w * std, b + w @ mean
    w_sk, b_sk = theirs(z, y, l2)
    assert abs(loss_of(z, y, w, b, l2) - loss_of(z, y, w_sk, b_sk, l2)) < 1e-7
    assert (w - w_sk).abs().max() < 1e-4
    assert (b - b.mean() - b_sk).abs().max() < 1e-4


@pytest.mark.parametrize("l2", [1e-4, 1e-8, 1e-12])
def test_separable_rows_reach_the_optimum_however_small_l2(l2, monkeypatch):
    reached: list[Optimum] = []

    def spied(problem, iterations):
        reached.append(optimum(problem, iterations))
        return reached[-1]

    optimum = fit_head.optimum
    monkeypatch.setattr(fit_head, "optimum", spied)
    for n, d in ((60, 100), (400, 30)):
        x, y = made(n, d, 4, 4.0)
        w, b = fit_rows(x, y, 4, HeadSpec(l2=l2))
        assert (x @ w.T + b).argmax(1).equal(y)
        z, _, _ = standardised(x)
        w, b = w.double() * x.double().std(0, unbiased=False), b.double() + w.double() @ x.double().mean(0)
        at = w.requires_grad_()
        value = torch.nn.functional.cross_entropy(z @ at.T + b, y) + l2 / 2 * at.square().sum()
        (slope,) = torch.autograd.grad(value, at)
        assert slope.norm() < 1e-3 * (l2 * at.norm())  # the two halves of the gradient cancel: no early stop does it
    assert all(r.converged and r.gradient < 1e-8 for r in reached)
    assert len(reached) == 2


def test_fits_that_miss_the_optimum_are_reported():
    x, y = made(200, 10, 3, 4.0)
    said: list[Optimum] = []
    fit_rows(x, y, 3, HeadSpec(l2=1e-8, iterations=3), missed=said.append)
    assert (said[0].iterations, said[0].converged) == (3, False)
    assert 1e-8 < said[0].gradient < 1
    w, _ = fit_rows(x, y, 3, HeadSpec(l2=0.0), missed=said.append)  # separable: the loss falls for ever
    assert len(said) == 2
    assert torch.isfinite(w).all()
    fit_rows(x, torch.zeros_like(y), 3, HeadSpec(l2=0.0), missed=said.append)  # one class: nothing to find
    fit_rows(x[:1].repeat(6, 1), y[:6], 3, missed=said.append)  # equal rows: only the bias
    assert len(said) == 2


def test_the_head_follows_l2_smoothly_and_neither_order_nor_threads_of_the_rows():
    x, y = made(600, 40, 6, 2.0)
    w, _ = fit_rows(x, y, 6, HeadSpec(l2=1e-4))
    near, _ = fit_rows(x, y, 6, HeadSpec(l2=1e-4 * (1 + 1e-8)))
    size = w.abs().max()
    assert (near - w).abs().max() < 1e-6 * size
    turned, _ = fit_rows(x.flip(0), y.flip(0), 6, HeadSpec(l2=1e-4))
    assert (turned - w).abs().max() < 1e-6 * size
    for threads in (1, 2):
        with torch_threads(threads):
            assert (fit_rows(x, y, 6, HeadSpec(l2=1e-4))[0] - w).abs().max() < 1e-6 * size


def test_classes_that_are_absent_take_no_part():
    x, y = made(200, 8, 3, 1.0)
    places = torch.tensor([1, 4, 6])
    w, b = fit_rows(x, y, 3)
    wide_w, wide_b = fit_rows(x, places[y], 8)
    assert wide_w[places].equal(w)
    assert wide_b[places].equal(b)
    assert wide_b[[0, 2, 3, 5, 7]].tolist() == [NOBODY] * 5
