"""Linear heads on frozen features, a whole cohort as one batched product.

With the backbone frozen, a client trains a softmax regression on cached features. K clients are one weight
(K, C, d) and one bias (K, C); a step is two batched products, the second of which adds -eta times the gradient to the
weight in place where the optimiser is plain SGD.

A cohort gives the same bits as the clients one by one. A client's slice of a batched product depends neither on how
many clients stand beside it nor on their values, but the order in which MKL sums depends on where a matrix begins in
memory: every client's matrices begin at a multiple of 64 bytes, which is why d and the batch size are padded to
multiples of 16. Rows of padding, also those that fill a last batch, have weight zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedfm.params import Params
from fedfm.training import SGD, gram
from fedfm.training.job import LINE, Job, plan
from fedfm.training.rules import Rule

WIDTH = 64  # clients a chunk: more would not make a step's operations cheaper, and their features have to be held
_GATHER = 1 << 19  # entries of features that are gathered at a time: several steps of a chunk, still in the cache


def applies(model: Any) -> bool:
    """The model is a linear head with softmax cross-entropy on features that are already there."""
    return (
        getattr(model, "adaptation", None) == "head"
        and getattr(model, "softmax", True)
        and getattr(model, "task", None) == "classification"
        and isinstance(model.head, torch.nn.Linear)
        and len(_names(model)) == 2
    )


def _names(model: Any) -> list[str]:
    """Names of the head's weight (C, d) and bias (C,)."""
    return sorted(model.names, key=lambda name: not name.endswith("weight")) if len(model.names) == 2 else []


def train(jobs: Sequence[Job]) -> list[Params]:
    """All jobs (same head, same optimiser) together, each where it is cheaper: on the weights, or in its rows' span."""
    names = _names(jobs[0].client.model)
    classes, width = jobs[0].w[names[0]].shape
    kinds: dict[int, list[int]] = {}  # places in the span, 0: on the weights
    for i, job in enumerate(jobs):
        kinds.setdefault(gram.places(job) if gram.pays(job, classes, width) else 0, []).append(i)
    out: list[Any] = [None] * len(jobs)
    for places, members in kinds.items():
        together = [jobs[i] for i in members]
        results = gram.train(together, *names) if places else _train(together)
        for i, (trained, loss) in zip(members, results, strict=True):
            jobs[i].client.metrics["loss"] = loss
            out[i] = trained
    return out


def _train(jobs: Sequence[Job]) -> list[tuple[Params, float]]:
    """On the weights, in lockstep; those with fewer batches stop earlier."""
    sequence = sorted(range(len(jobs)), key=lambda i: -jobs[i].local.steps(len(jobs[i].client.data.train)))
    ordered = [jobs[i] for i in sequence]
    local = ordered[0].local
    names = _names(ordered[0].client.model)
    steps = [local.steps(len(job.client.data.train)) for job in ordered]
    w, b = _stack(names, [job.w for job in ordered])
    d = ordered[0].w[names[0]].shape[1]
    pull = _Pull(ordered, names, w, b)
    plain = isinstance(local, SGD) and not local.momentum and not pull
    keep = 1 - local.learning_rate * local.weight_decay
    rules = () if plain else (Rule(local, w), Rule(local, b))
    batches = _Batches(ordered, steps, w)
    losses = torch.zeros(len(ordered))
    active = len(ordered)
    for step in range(max(steps, default=0)):
        while steps[active - 1] <= step:
            active -= 1
            for rule in rules:
                rule.narrow(active)
        x, y, share = batches.at(step, active)  # (K, B, d), (K, 1, B), (K, 1, B)
        error = torch.bmm(w[:active], x.transpose(1, 2)).add_(b[:active, :, None])  # (K, C, B)
        error = torch.log_softmax(error, 1)
        losses[:active] -= (error.gather(1, y) * share).sum((1, 2))
        error.exp_().scatter_add_(1, y, batches.minus_one[:active]).mul_(share)
        if plain:  # w <- (1 - eta lambda) w - eta gradient
            w[:active].baddbmm_(error, x, beta=keep, alpha=-local.learning_rate)
            b[:active].mul_(keep).sub_(error.sum(2), alpha=local.learning_rate)
        else:
            gradients = torch.bmm(error, x), error.sum(2)
            pull.add(gradients, (w, b), active)
            for rule, p, g in zip(rules, (w, b), gradients, strict=True):
                rule.step(p[:active], g)
    out: list[Any] = [None] * len(jobs)
    mean_losses = losses.tolist()
    for k, (i, trained) in enumerate(zip(sequence, _heads(ordered, names, w[:, :, :d], b), strict=True)):
        out[i] = trained, mean_losses[k] / max(steps[k], 1)
    return out


def _heads(jobs: Sequence[Job], names: Sequence[str], w: Tensor, b: Tensor) -> list[Params]:
    """One Params a client, all in one buffer."""
    layout = jobs[0].w.layout
    flats = w.new_empty(len(jobs), layout.sizes[w.dtype])
    for name, values in zip(names, (w, b), strict=True):
        _, start, stop, _ = layout.slots[name]
        flats[:, start:stop].view(values.shape).copy_(values)
    return [Params.from_flat(layout, {w.dtype: flat}) for flat in flats.unbind()]


def _stack(names: Sequence[str], heads: Sequence[Params]) -> tuple[Tensor, Tensor]:
    """Weights (K, C, d) with d padded by zeros, which every update rule leaves at zero, and biases (K, C)."""
    w, b = (torch.stack([head[name] for head in heads]) for name in names)
    return pad(w, (0, -w.shape[2] % LINE)), b


class _Pull:
    """What is added to the gradients: mu (v - w) of a proximal term, and a correction; false where there is neither."""

    def __init__(self, jobs: Sequence[Job], names: Sequence[str], w: Tensor, b: Tensor) -> None:
        self.mu = torch.tensor([job.mu for job in jobs]) if any(job.mu for job in jobs) else None
        self.start = (w.clone(), b.clone()) if self.mu is not None else ()
        corrections = [job.correction for job in jobs if job.correction is not None]
        self.corrections = _stack(names, corrections) if corrections else ()

    def __bool__(self) -> bool:
        return self.mu is not None or bool(self.corrections)

    def add(self, gradients: Sequence[Tensor], at: Sequence[Tensor], active: int) -> None:
        """In place, for the first ``active`` clients."""
        for i, (g, p) in enumerate(zip(gradients, at, strict=True)):
            if self.mu is not None:
                mu = self.mu[:active].view(-1, *[1] * (p.dim() - 1))
                g.add_((p[:active] - self.start[i][:active]).mul_(mu))
            if self.corrections:
                g.add_(self.corrections[i][:active])


class _Batches:
    """The mini-batches of a chunk in lockstep, the features of several steps gathered at a time."""

    def __init__(self, jobs: Sequence[Job], steps: Sequence[int], like: Tensor) -> None:
        width = like.shape[2]
        size = -(-jobs[0].local.batch_size // LINE) * LINE
        self._steps, self._size = steps, size
        self._span = max(1, min(_GATHER // max(len(jobs) * size * width, 1), max(steps, default=1)))  # steps at a time
        self._features = [job.client.data.train.tensors["features"] for job in jobs]
        self._width = self._features[0].shape[1]
        self._index, self._labels, self._share = plan(jobs, steps, size)
        self._x = like.new_zeros(len(jobs), self._span * size, width)
        self.minus_one = like.new_full((len(jobs), 1, size), -1.0)

    def at(self, step: int, active: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features (K, B, d), labels (K, 1, B) and shares (K, 1, B) of a step."""
        at = step % self._span
        if at == 0:
            for k in range(active):
                count = min(self._span, self._steps[k] - step)
                index = self._index[k, step : step + count].view(-1)
                out = self._x[k, : count * self._size, : self._width]
                torch.index_select(self._features[k], 0, index, out=out)
        x = self._x[:active, at * self._size : (at + 1) * self._size]
        return x, self._labels[:active, step : step + 1], self._share[:active, step : step + 1]
