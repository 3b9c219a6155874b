"""Train linear heads on frozen features, one client after another, by compiled loops.

With a frozen backbone a client trains a softmax regression on cached features. Call overhead dominates the time of a
small head, so all steps of a client are one call (:mod:`fedfm.linalg.kernels.softmax_sgd`). Other update rules
than plain SGD run in Python, with gradients from the same kernel. A client's result does not depend on other clients.

With several epochs over fewer rows than features, SGD runs in the span of the client's rows, since it moves W only
along their features x_i. So W_t = s_t W_0 + A_t^T X, where A_t (n, C) has one coefficient for each row and class, and
s_t is the product of the weight decays. The logits of a batch are

    X_b W_t^T = s_t (X_b W_0^T) + (X_b X^T) A_t.

The terms in brackets are rows of X W_0^T and of the Gram matrix X X^T. Both matrices are computed once. A step costs
b n C multiply-adds instead of 2 b d C. The bias is the weight of one more feature, which is always 1.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from fedfm.linalg.params import Layout, Params
from fedfm.training.local_job import Job
from fedfm.training.optimisers import SGD
from fedfm.training.update_rules import Rule, places

_FIXED = 1 << 20  # overhead of the calls, in multiply-adds: the number that would take the same time


def pays_in_span(local: SGD, n: int, classes: int, width: int) -> bool:
    """Whether training on n rows (n, width) takes fewer multiplications in the rows' span than on the weights."""
    whole, steps = n * n * width + 2 * n * width * classes, (local.epochs - 0.5) * n * n * classes
    return whole + steps + _FIXED < 2 * local.epochs * n * width * classes


def train(jobs: Sequence[Job]) -> list[Params]:
    """Train one job after another; raises a ValueError if labels are missing or outside the head's classes."""
    return [_train(job) for job in jobs]


@functools.lru_cache(maxsize=64)
def _names(layout: Layout) -> tuple[str, str]:
    """Names of the head's weight (C, d) and bias (C,)."""
    weight, bias = sorted(layout.slots, key=lambda name: not name.endswith("weight"))
    return weight, bias


def _train(job: Job) -> Params:
    names = _names(job.w.layout)
    classes, width = job.w.layout.slots[names[0]][3]
    x, y, least, most = job.client.data.train.features_and_labels
    n = len(x)
    if x.shape != (n, width) or y.shape != (n,) or (n and not 0 <= least <= most < classes):
        raise ValueError(f"features {x.shape} and labels {y.shape} do not fit a head of {width}x{classes}")
    if not n:
        job.client.metrics["loss"] = 0.0
        return job.w
    if isinstance(job.local, SGD) and not job.local.momentum and not job.terms.mu and job.terms.correction is None:
        in_span = not _spares_bias(job) and pays_in_span(
            job.local, n, classes, width
        )  # in the span the bias is one more weight
        trained, loss = _plain(job, x, y, names, in_span)
    else:
        trained, loss = _by_rule(job, x, y, names)
    job.client.metrics["loss"] = loss
    return trained


def _no_weight_decay(job: Job) -> Collection[str]:
    return getattr(job.client.model, "no_weight_decay", ())


def _spares_bias(job: Job) -> bool:
    """Whether weight decay does not change the bias."""
    return bool(_no_weight_decay(job)) and job.local.spares_biases


def _pieces(flat: Tensor, layout: Layout, names: Sequence[str]) -> list[np.ndarray]:
    """Views of these tensors in a flat vector."""
    array = flat.numpy()
    return [array[start:stop] for _, start, stop, _ in (layout.slots[name] for name in names)]


def _plain(job: Job, x: np.ndarray, y: np.ndarray, names: Sequence[str], in_span: bool) -> tuple[Params, float]:
    """Plain SGD in one call, on the weights or in the rows' span."""
    from fedfm.linalg.kernels import softmax_sgd

    local, layout, start = job.local, job.w.layout, job.w.flats[torch.float32]
    trained = torch.empty_like(start)
    at_w, (_, at_b, end, _) = layout.slots[names[0]][1], layout.slots[names[1]]
    of = min(local.batch_size, len(y)), x.shape[1], end - at_b
    eta, decays = local.learning_rate, [local.weight_decay]
    if in_span:
        descend, scratch = softmax_sgd.descend_in_span, softmax_sgd.scratch_in_span(*of, len(y))
    else:
        descend, scratch = softmax_sgd.descend, softmax_sgd.scratch(*of)
        decays.append(0.0 if _spares_bias(job) else local.weight_decay)
    orders = job.epochs()
    flats = start.numpy(), trained.numpy()
    loss = descend(x, y, orders, local.batch_size, *flats, at_w, at_b, end - at_b, eta, *decays, *scratch)
    return Params.from_flat(layout, {torch.float32: trained}), loss


def _by_rule(job: Job, x: np.ndarray, y: np.ndarray, names: Sequence[str]) -> tuple[Params, float]:
    """Momentum, Adam, AdamW, a proximal term or a correction: gradients from the kernel, steps by the rule."""
    from fedfm.linalg.kernels import softmax_sgd

    local, layout, start = job.local, job.w.layout, job.w.flats[torch.float32]
    flat, gradient = start.clone(), torch.empty_like(start)
    correction = (
        None if job.terms.correction is None else torch.cat([job.terms.correction[name].reshape(-1) for name in job.w])
    )
    w, g = _pieces(flat, layout, names), _pieces(gradient, layout, names)
    rule = Rule(local, flat, places(layout, _no_weight_decay(job)))
    scratch = softmax_sgd.scratch(min(local.batch_size, len(y)), x.shape[1], len(w[1]))
    more, losses = [np.empty_like(r) for r in scratch[:2]], []
    for batch in job.orders():
        losses.append(softmax_sgd.gradient(x, y, batch, *w, *g, *scratch, *more))
        if job.terms.mu:
            gradient.add_(flat, alpha=job.terms.mu).sub_(start, alpha=job.terms.mu)
        if correction is not None:
            gradient.add_(correction)
        rule.step(flat, gradient)
    return Params.from_flat(layout, {torch.float32: flat}), sum(losses) / len(losses)
