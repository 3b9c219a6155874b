"""Attention in compiled loops against autograd over torch's own operations, sequence by sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedfm.linalg.kernels import simd
from fedfm.linalg.kernels.jit import compile_cached
from fedfm.training.packed import attention
from fedfm.training.packed.attention import Shape

LENGTHS = {"unequal": (1, 5, 16, 17, 33, 8), "equal": (16, 16, 16), "one": (7,)}


def plain(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Softmax(q k^T) v of one sequence."""
    split = [x.view(len(x), heads, -1).transpose(0, 1) for x in (q, k, v)]
    out = torch.softmax(split[0] @ split[1].transpose(1, 2), 2) @ split[2]
    return out.transpose(0, 1).reshape(len(q), -1)


@pytest.mark.parametrize("size", [16, 32, 48])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_equals_autograd(lengths: tuple[int, ...], size: int) -> None:
    heads, shape, rng = 3, Shape(np.array(lengths), fused=True), torch.Generator().manual_seed(0)
    d, n = heads * size, shape.tokens
    qkv = torch.randn(shape.rows, 3 * d, generator=rng).requires_grad_()
    g = torch.randn(shape.rows, d, generator=rng)
    g[n:] = 0
    expected = torch.cat([plain(*part.chunk(3, 1), heads) for part in qkv[:n].split(list(lengths))])
    (gradient,) = torch.autograd.grad(expected, qkv, g[:n])
    assert attention.fits(d, heads)
    out, saved = attention.forward(qkv.detach(), shape, heads)
    found = attention.backward(g, saved, shape, heads)
    torch.testing.assert_close(out[:n], expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=2e-5)
    assert not out[n:].any()
    assert not found[n:].any()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_first_token_equals_autograd(lengths: tuple[int, ...]) -> None:
    heads, d, shape, rng = 2, 64, Shape(np.array(lengths), fused=True), torch.Generator().manual_seed(1)
    n, count = shape.tokens, len(lengths)
    q = torch.randn(count, d, generator=rng).requires_grad_()
    kv = torch.randn(shape.rows, 2 * d, generator=rng).requires_grad_()
    g = torch.randn(count, d, generator=rng)
    parts = zip(q.split(1), kv[:n].split(list(lengths)), strict=True)
    expected = torch.cat([plain(one, *rows.chunk(2, 1), heads) for one, rows in parts])
    gradients = torch.autograd.grad(expected, (q, kv), g)
    out, saved = attention.forward_first(q.detach(), kv.detach(), shape, heads)
    found = attention.backward_first(g, saved, shape, heads)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


def test_heads_of_other_sizes_do_not_fit() -> None:
    assert not attention.fits(64, 3)
    assert not attention.fits(24, 1)


def test_exponential() -> None:
    @compile_cached
    def run(z: np.ndarray, out: np.ndarray) -> None:
        for i in range(0, len(z), 16):
            simd.store(out, i, simd.exp(simd.load(z, i)))

    z = np.concatenate([np.linspace(-87, 0, 4080), np.full(16, -1e30)]).astype(np.float32)
    out = np.empty_like(z)
    run(z, out)
    expected = np.exp(np.maximum(z, -87).astype(np.float64))
    assert np.abs(out / expected - 1).max() < 3e-7
