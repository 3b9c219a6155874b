"""Linear heads on frozen features, a whole cohort as one batched product.

With the backbone frozen, a client trains a softmax regression on cached features. K clients are one (K, C, d + 1)
tensor, a step is two ``bmm``. A client's slice of a ``bmm`` does not depend on how many clients stand beside it, so a
cohort gives the same bits as the clients one by one; that is why every mini-batch has the full batch size, padded
with rows of weight zero, and why the bias is a column of ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.params import Params
from fedfm.training.cohort import Job
from fedfm.training.rules import Rule

WIDTH = 16  # clients a chunk: their features and heads still fit the cache


def applies(model: Any) -> bool:
    """The model is a linear head with softmax cross-entropy on features that are already there."""
    return (
        getattr(model, "adaptation", None) == "head"
        and getattr(model, "task", None) == "classification"
        and isinstance(model.head, torch.nn.Linear)
        and len(_names(model)) == 2
    )


def _names(model: Any) -> list[str]:
    """Names of the head's weight (C, d) and bias (C,)."""
    return sorted(model.names, key=lambda name: not name.endswith("weight")) if len(model.names) == 2 else []


def train(jobs: Sequence[Job]) -> list[Params]:
    """All jobs (same head, same optimiser) in lockstep; those with fewer batches stop earlier."""
    sequence = sorted(range(len(jobs)), key=lambda i: -jobs[i].local.steps(len(jobs[i].client.data.train)))
    ordered = [jobs[i] for i in sequence]
    local = ordered[0].local
    weight, bias = _names(ordered[0].client.model)
    size, steps = local.batch_size, [local.steps(len(job.client.data.train)) for job in ordered]
    features = [_with_ones(job.client.data.train.tensors["features"]) for job in ordered]
    labels = [_labels(job) for job in ordered]
    w = torch.stack([torch.cat([job.w[weight], job.w[bias][:, None]], 1) for job in ordered])  # (K, C, d + 1)
    start = w.clone() if any(job.mu for job in ordered) else None
    mu = torch.tensor([job.mu for job in ordered])[:, None, None]
    correction = None
    if ordered[0].correction is not None:
        corrections = [job.correction for job in ordered if job.correction is not None]
        correction = torch.stack([torch.cat([c[weight], c[bias][:, None]], 1) for c in corrections])
    rule = Rule(local, w)
    plans = [_plan(job, size) for job in ordered]
    x = w.new_empty(len(ordered), size, w.shape[2])
    y = torch.empty(len(ordered), size, dtype=torch.int64)
    share = w.new_empty(len(ordered), size, 1)
    losses = torch.zeros(len(ordered))
    active = len(ordered)
    for step in range(max(steps, default=0)):
        while steps[active - 1] <= step:
            active -= 1
            rule.narrow(active)
        for k in range(active):
            index, mass = plans[k][0][step], plans[k][1][step]
            torch.index_select(features[k], 0, index, out=x[k])
            torch.index_select(labels[k], 0, index, out=y[k])
            share[k, :, 0] = mass
        head = w[:active]
        error = torch.log_softmax(torch.bmm(x[:active], head.transpose(1, 2)), 2)  # (K, B, C)
        picked = y[:active, :, None]
        losses[:active] -= (error.gather(2, picked) * share[:active]).sum((1, 2))
        error.exp_().scatter_add_(2, picked, -torch.ones_like(share[:active])).mul_(share[:active])
        gradient = torch.bmm(error.transpose(1, 2), x[:active])  # (K, C, d + 1)
        if start is not None:
            gradient.add_((head - start[:active]).mul_(mu[:active]))
        if correction is not None:
            gradient.add_(correction[:active])
        rule.step(head, gradient)
    out: list[Any] = [None] * len(jobs)
    for k, i in enumerate(sequence):
        job = jobs[i]
        job.client.metrics["loss"] = float(losses[k]) / max(steps[k], 1)
        parts = {weight: w[k, :, :-1], bias: w[k, :, -1]}
        out[i] = Params({name: parts[name] for name in job.w})
    return out


def _labels(job: Job) -> Tensor:
    labels = job.client.data.train.labels
    if labels is None:
        raise ValueError("a head is trained on labelled rows")
    return labels


def _with_ones(features: Tensor) -> Tensor:
    return torch.cat([features, features.new_ones(len(features), 1)], 1)


def _plan(job: Job, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Row indexes of every batch, padded to ``size``, and each row's share of the mean: 1/b, and 0 for padding."""
    indexes, shares = [], []
    for order in job.orders():
        index, mass = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.float32)
        index[: len(order)], mass[: len(order)] = order, 1 / len(order)
        indexes.append(torch.from_numpy(index))
        shares.append(torch.from_numpy(mass))
    return indexes, shares
