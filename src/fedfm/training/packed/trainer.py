"""Local training of one or several clients, one packed batch in each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedfm.linalg.params import Params
from fedfm.training.local_job import Job
from fedfm.training.packed import attention
from fedfm.training.packed.batch import Batch
from fedfm.training.packed.net import Net
from fedfm.training.packed.prefix import Cache
from fedfm.training.update_rules import Rule


def train(net: Net, cache: Cache, jobs: Sequence[Job], fast: bool) -> list[Params]:
    """Train all jobs (same model, same optimiser) in lockstep; jobs with fewer batches stop earlier.

    Args:
        fast: whether to use compiled attention if it supports the model; compiled attention rounds differently.
    """
    fused = fast and attention.fits(net.width, net.layers[0].heads)
    orders = [list(job.orders()) for job in jobs]
    sequence = sorted(range(len(jobs)), key=lambda i: -len(orders[i]))
    ordered, plans = [jobs[i] for i in sequence], [orders[i] for i in sequence]
    p = torch.empty(len(jobs), net.flat.size)
    for k, job in enumerate(ordered):
        fill(net, p[k], job.w)
    g = torch.zeros_like(p)
    start = p.clone() if any(job.terms.mu for job in jobs) else None
    mu = torch.tensor([[job.terms.mu] for job in ordered])
    correction = None
    if any(job.terms.correction is not None for job in jobs):
        correction = torch.zeros_like(p)
        for k, job in enumerate(ordered):
            if job.terms.correction is not None:
                fill(net, correction[k], job.terms.correction)
    prefixes = [cache.of(net, job) for job in ordered]
    labels = [job.client.data.train.labels for job in ordered]
    weights, gradients = [net.flat.views(row) for row in p], [net.flat.views(row) for row in g]
    local, no_weight_decay = ordered[0].local, ordered[0].client.model.no_weight_decay
    rule = Rule(local, p, net.flat.places(no_weight_decay))
    losses, active = [0.0] * len(jobs), len(jobs)
    for step in range(len(plans[0])):
        while len(plans[active - 1]) <= step:
            active -= 1
            rule.narrow(active)
        index = [plan[step] for plan in plans[:active]]
        targets = [y[torch.from_numpy(i)] for y, i in zip(labels, index, strict=False) if y is not None]
        batch = Batch(net, prefixes[:active], index, weights, gradients, fused)
        for k, loss in enumerate(batch.descend(targets)):
            losses[k] += loss
        gradient = g[:active]
        if start is not None:
            gradient.add_((p[:active] - start[:active]).mul_(mu[:active]))
        if correction is not None:
            gradient.add_(correction[:active])
        rule.step(p[:active], gradient)
    out: list[Any] = [None] * len(jobs)
    for k, i in enumerate(sequence):
        jobs[i].client.metrics["loss"] = losses[k] / max(sum(map(len, plans[k])), 1)
        out[i] = Params({name: net.flat.tensor(name, weights[k]) for name in jobs[i].w})
    return out


def fill(net: Net, row: torch.Tensor, w: Mapping[str, torch.Tensor] | Params) -> None:
    """Copy ``w`` into a client's flat vector ``row`` (P,)."""
    views = net.flat.views(row)
    for name in net.names:
        net.flat.tensor(name, views).copy_(w[name])
