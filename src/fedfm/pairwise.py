"""Inner products of every pair of vectors, and weighted sums of all: what a server that tells clients apart does.

Placeholder of the streamed version: the interface is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedfm.params import Params


def gram(
    vectors: Sequence[Params], layers: Sequence[Sequence[str]] | None = None, *, centre: bool = False
) -> np.ndarray:
    """(L, K, K) float64."""
    out = []
    for names in layers or [tuple(vectors[0])]:
        x = torch.stack([torch.cat([v[n].reshape(-1).double() for n in names]) for v in vectors])
        if centre:
            x = x - x.mean(1, keepdim=True)
        out.append((x @ x.T).numpy())
    return np.stack(out)


def mix(
    weights: np.ndarray,
    vectors: Sequence[Params],
    layers: Sequence[Sequence[str]] | None = None,
    onto: Sequence[Params] | None = None,
) -> list[Params]:
    """M new Params."""
    out = []
    for i in range(weights.shape[1]):
        base = onto[i] if onto is not None else vectors[i]
        tensors = dict(base)
        for layer, names in enumerate(layers or [tuple(vectors[0])]):
            for n in names:
                total = sum(float(p) * v[n] for p, v in zip(weights[layer, i], vectors, strict=True) if p)
                tensors[n] = (base[n] if onto is not None else 0 * base[n]) + total
        out.append(Params(tensors))
    return out
