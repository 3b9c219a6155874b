"""EM for many groups at once as batches of tensors, for a GPU; the steps, floors and stopping rules of ``kernel``.

Groups of similar size share a bucket, padded with rows and components of weight 0; at most a quarter of a bucket's rows
are padding. Everything is float64, so that squares of centred rows may be expanded and distances and sums are matrix
products. A group's mixture equals that of the compiled loops up to rounding; its bits may depend on its bucket. The
host waits once a step to learn which groups have ended (full covariances: twice, because a factor may fail). It has not
run on a GPU: tests run it on device "cpu", and on one that refuses the host's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedfm.methods.fedpft.mixtures import full, kernel
from fedfm.methods.fedpft.mixtures.full import Found
from fedfm.methods.fedpft.mixtures.group import Started
from fedfm.methods.fedpft.mixtures.mixture import Array

ENTRIES = 1 << 27  # numbers in a bucket: 1 GiB
FILLED = 0.75  # least rows of a group, as a share of those of its bucket's largest


def rest(
    groups: Sequence[Found | Started], covariance: str, max_iter: int, tol: float, device: torch.device | str
) -> list[Found]:
    """The groups in their order; those that have only started are fitted by EM on the device."""
    out = {i: g for i, g in enumerate(groups) if not isinstance(g, Started)}
    starts = {i: g for i, g in enumerate(groups) if isinstance(g, Started)}
    shapes = {i: (*s.x.shape, s.k) for i, s in starts.items()}
    for bucket in buckets(shapes, covariance):
        found = _em([starts[i] for i in bucket], covariance, max_iter, tol, torch.device(device))
        out |= {i: starts[i].ended(one) for i, one in zip(bucket, found, strict=True)}
    return [out[i] for i in range(len(groups))]


def buckets(shapes: Mapping[int, tuple[int, int, int]], covariance: str) -> list[list[int]]:
    """Which groups of shapes (n, d, K) run together; every group once."""
    found: list[list[int]] = []
    rows = most = 0  # of the last bucket
    for i in sorted(shapes, key=lambda i: (-shapes[i][0], i)):
        n, d, k = shapes[i]
        wide = max(most, k)
        each = wide * d * (2 * rows + 3 * d) if covariance == "full" else 2 * rows * (d + wide)
        if found and n >= FILLED * rows and (len(found[-1]) + 1) * each <= ENTRIES:
            found[-1].append(i)
            most = wide
        else:
            found.append([i])
            rows, most = n, k
    return found


def _em(starts: Sequence[Started], covariance: str, max_iter: int, tol: float, device: torch.device) -> list[Found]:
    """One bucket: B groups of at most N rows and K components. A group that has ended leaves the batch."""
    many, rows, d = len(starts), max(len(s.x) for s in starts), starts[0].x.shape[1]
    most = max(s.k for s in starts)
    fall = full.FALL if covariance == "full" else kernel.FALL
    host, hard = np.zeros((many, rows, d)), np.zeros((many, rows, most))
    for b, s in enumerate(starts):
        host[b, : len(s.x)] = s.x
        hard[b, np.arange(len(s.x)), s.labels] = 1
    x, r = torch.from_numpy(host).to(device), torch.from_numpy(hard).to(device)  # (B, N, d), (B, N, K)
    sizes = np.array([(len(s.x), s.floor) for s in starts])
    n, floor = torch.from_numpy(sizes).to(device).unbind(1)  # (B,)
    real = r.sum(2)  # (B, N): 1 of a row, 0 of padding
    place = list(range(many))  # indices of the groups that still run
    w, mu = x.new_zeros(many, most), x.new_zeros(many, most, d)
    v = x.new_ones(many, most, *{"spherical": (1,), "diag": (d,), "full": (d, d)}[covariance])
    if covariance == "full":
        v = torch.eye(d, dtype=x.dtype, device=device).expand_as(v)
    before: tuple[Tensor, ...] = (w, mu, v)  # the last M step
    last = x.new_full((many,), -math.inf)
    out: list[Found | None] = [None] * many
    for step in range(max_iter + 1):
        done = torch.zeros(len(x), dtype=torch.bool, device=device)
        fell, new = done, last
        if step:
            joint = w.log()[:, None] + _log_normal(x, mu, v)  # (B, N, K)
            mass = joint.logsumexp(2)
            new = (mass * real).sum(1) / n
            r = (joint - mass[..., None]).exp() * real[..., None]
            fell = new < last - fall * (d + last.abs()) if step > 1 else done
        after = _maximise(x, r, n, floor, (w, mu, v))
        if step:
            after = tuple(
                torch.where(fell.view(-1, *[1] * (t.ndim - 1)), t, u) for t, u in zip(before, after, strict=True)
            )
            done = fell | ((new - last).abs() < tol)
            last = torch.where(fell, last, new)
        before, (w, mu, v) = (w, mu, v), after
        converged = done.cpu().tolist()  # the one wait of a step
        ended = [b for b, one in enumerate(converged) if one or step == max_iter]
        if ended:
            gone = torch.from_numpy(np.array(ended)).to(device)
            scales = v[gone] if covariance == "full" else v[gone].sqrt()
            wide = tuple(t.cpu().numpy() for t in (w[gone], mu[gone], scales.float(), last[gone]))
            for i, b in enumerate(ended):
                at = place[b]
                out[at] = _found([t[i] for t in wide], starts[at].k, covariance, step, converged[b])
            stays = sorted(set(range(len(place))) - set(ended))
            if not stays:
                break
            place, keep = [place[b] for b in stays], torch.from_numpy(np.array(stays)).to(device)
            x, n, floor, real, last, w, mu, v = (t[keep] for t in (x, n, floor, real, last, w, mu, v))
            before = tuple(t[keep] for t in before)
    return [one for one in out if one is not None]


def _log_normal(x: Tensor, mu: Tensor, v: Tensor) -> Tensor:
    """(B, N, K) of rows (B, N, d) under means (B, K, d); v: variances (B, K, 1 or d) or factors (B, K, d, d)."""
    d = x.shape[2]
    if v.ndim == 4:
        t = torch.linalg.solve_triangular(v, (x[:, None] - mu[:, :, None]).transpose(2, 3), upper=False)  # (B, K, d, N)
        square, log_det = t.square().sum(2).transpose(1, 2), 2 * v.diagonal(dim1=2, dim2=3).log().sum(2)
    else:
        inverse = v.reciprocal().expand_as(mu)  # (B, K, d)
        square = x.square() @ inverse.mT - 2 * x @ (mu * inverse).mT + (mu.square() * inverse).sum(2)[:, None]
        log_det = v.log().expand_as(mu).sum(2)
    out: Tensor = -0.5 * (square + log_det[:, None] + d * math.log(2 * math.pi))
    return out


def _maximise(x: Tensor, r: Tensor, n: Tensor, floor: Tensor, old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """M step; a component without rows does not change."""
    counts = r.sum(1)  # (B, K)
    any_rows = counts > kernel.NONE
    safe = torch.where(any_rows, counts, 1.0)[..., None]
    mu = r.mT @ x / safe  # (B, K, d)
    if old[2].ndim == 4:
        t = x[:, None] - mu[:, :, None]  # (B, K, N, d)
        v = (t * r.mT[..., None]).mT @ t / safe[..., None]
        v.diagonal(dim1=2, dim2=3).add_(floor[:, None, None])
        eye = torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
        v = torch.linalg.cholesky(torch.where(any_rows[..., None, None], v, eye))
    else:
        v = (r.mT @ x.square() / safe - mu.square()).clamp_min(0)
        v = (v if old[2].shape == v.shape else v.mean(2, keepdim=True)) + floor[:, None, None]
    w = torch.where(old[0] + counts > 0, counts.clamp_min(1e-300), 0.0) / n[:, None]  # 0 for padding
    mu = torch.where(any_rows[..., None], mu, old[1])
    return w, mu, torch.where(any_rows.view(*any_rows.shape, *[1] * (v.ndim - 2)), v, old[2])


def _found(one: Sequence[Array], k: int, covariance: str, steps: int, converged: bool) -> Found:
    """One group's result from (w, mu, scales, log-likelihood) on the host, without the padding."""
    w, mu, scales = (t[:k].copy() for t in one[:3])
    return w, mu, scales[:, 0] if covariance == "spherical" else scales, float(one[3]), steps, converged
