"""Side adapters on cached states, trained one client after the other by compiled loops.

Autograd's step over some hundred small tensors takes a millisecond or two, hardly any of it for products. Here loss and
gradient of a mini-batch are one call (:mod:`fedfm.linalg.kernels.side_chain`), and the optimiser one more. A client's
bits depend on this client alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from fedfm.linalg.params import Layout, Params
from fedfm.models.adapters.side_adapter import STATES, SideModel
from fedfm.models.model import Model
from fedfm.training import loop
from fedfm.training.local_job import Job
from fedfm.training.update_rules import Rule, places

NAMES = ("down", "up", "alpha", "mix_down", "mix_up", "head.weight", "head.bias")


def applies(model: Model) -> bool:
    """Whether the model is a chain of side adapters on the CPU."""
    return isinstance(model, SideModel) and model.device.type == "cpu" and model.softmax


def train(jobs: Sequence[Job]) -> list[Params]:
    """Train one job after the other; rows that are no states are left to :mod:`fedfm.training.loop`."""
    return [_train(job) if STATES in job.client.data.train.tensors else loop.train([job])[0] for job in jobs]


@functools.lru_cache(maxsize=64)
def _places(layout: Layout) -> np.ndarray:
    """Where each of :data:`NAMES` begins in the flat vector; 0 for those that are missing."""
    return np.array([layout.slots[n][1] if n in layout.slots else 0 for n in NAMES], np.int64)


def _train(job: Job) -> Params:
    from fedfm.linalg.kernels import side_chain

    layout, rows = job.w.layout, job.client.data.train
    (blocks, rank, width), classes = layout.slots["down"][3], layout.slots["head.bias"][3][0]
    positions = layout.slots["mix_down"][3][2] if "mix_down" in layout.slots else 1
    states, labels = rows.tensors[STATES], rows.labels
    if labels is None:
        raise ValueError("side adapters are trained on labelled rows")
    n, y = len(labels), labels.numpy()
    if states.shape != (n, blocks, positions, width) or (n and not 0 <= y.min() <= y.max() < classes):
        raise ValueError(f"states {tuple(states.shape)} and labels of {n} rows do not fit {blocks} adapters")
    if not n:
        job.client.metrics["loss"] = 0.0
        return job.w
    x = np.ascontiguousarray(states.numpy(), np.float32).reshape(-1)
    flat = job.w.flats[torch.float32].clone()
    rule = Rule(job.local, flat, places(layout, job.client.model.undecayed))
    start, gradient, seen = flat.clone(), torch.empty_like(flat), 0.0
    correction = None if job.correction is None else torch.cat([job.correction[name].reshape(-1) for name in job.w])
    shape = blocks, positions, width, rank, classes
    room, at = side_chain.scratch(min(job.local.batch_size, n), *shape), _places(layout)
    p, g = flat.numpy(), gradient.numpy()
    for batch, rule.eta in zip(job.orders(), job.rates(), strict=True):
        seen += side_chain.gradient(x, y, batch, p, g, at, *shape, room) * len(batch)
        if job.mu:
            gradient.add_(flat - start, alpha=job.mu)
        if correction is not None:
            gradient.add_(correction)
        rule.step(flat, gradient)
    job.client.metrics["loss"] = seen / (n * job.local.epochs)
    return Params.from_flat(layout, {torch.float32: flat})
