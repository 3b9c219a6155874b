"""Linear heads trained in the span of a client's own rows, where that is cheaper than in the space of the weights.

Plain SGD moves W only along the features x_i of the client, so that W_t = s_t W_0 - A_t^T X with one coefficient a row
and class, A_t (n, C), and s_t the product of the weight decays. A batch's logits are then

    X_b W_t^T = s_t (X_b W_0^T) - (X_b X^T) A_t,

rows of two products that are computed once, X W_0^T and the Gram matrix X X^T. A step costs 2 b n C multiply-adds
instead of 2 b d C twice, which pays over several epochs of fewer rows than features. The bias is one more feature
that is always 1.

A client's bits do not depend on its neighbours: what is computed once is computed for it alone, and in the steps it
stands only beside clients whose rows fill the same number of places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedfm.params import Params
from fedfm.training import SGD, Local
from fedfm.training.job import LINE, Job, plan
from fedfm.training.packed.linear import product


def pays(job: Job, classes: int, width: int) -> bool:
    """Fewer multiplications than steps on the weights; decided by what the client itself holds."""
    local, n = job.local, len(job.client.data.train)
    if not _linear(local) or job.mu or job.correction is not None:
        return False
    rows = local.steps(n) * _up(local.batch_size)  # over all epochs
    whole, steps = n * n * width + 2 * n * width * classes, rows * _up(n) * classes
    return whole + steps < 2 * rows * width * classes


def _linear(local: Local) -> bool:
    """The change of the weights is a fixed multiple of the batch's features."""
    return isinstance(local, SGD) and not local.momentum


def _up(n: int) -> int:
    return -(-n // LINE) * LINE


def places(job: Job) -> int:
    """How many rows' places the client takes: clients that take equally many are trained together."""
    n = _up(len(job.client.data.train))
    grain = max(LINE, 1 << max(n.bit_length() - 3, 0))  # at most a quarter is padding
    return -(-n // grain) * grain


def train(jobs: Sequence[Job], weight: str, bias: str) -> list[tuple[Params, float]]:
    """Jobs of equal :func:`places` and one optimiser: the trained head and the mean loss over its batches, of each."""
    local, size = jobs[0].local, places(jobs[0])
    rows = [job.client.data.train for job in jobs]
    steps = [local.steps(len(r)) for r in rows]
    sequence = sorted(range(len(jobs)), key=lambda k: -steps[k])
    jobs, rows, steps = ([things[k] for k in sequence] for things in (jobs, rows, steps))  # type: ignore[assignment]
    classes, keep = len(jobs[0].w[bias]), 1 - local.learning_rate * local.weight_decay

    like = jobs[0].w[weight]
    z = like.new_zeros(len(jobs), size, classes)  # X W_0^T + b_0
    gram = like.new_zeros(len(jobs), size, size)  # X X^T + 1
    for k, job in enumerate(jobs):
        n, x = len(rows[k]), rows[k].tensors["features"]
        z[k, :n] = product(x, job.w[weight], job.w[bias])
        torch.add(product(x, x), 1, out=gram[k, :n, :n])

    a = like.new_zeros(len(jobs), size, classes)
    index, labels, share = plan(jobs, steps, _up(local.batch_size))
    index += (torch.arange(len(jobs)) * size)[:, None, None]
    push = share * local.learning_rate
    picked, minus_one = torch.zeros_like(share), like.new_full((len(jobs), share.shape[2], 1), -1.0)
    active, scale = len(jobs), 1.0
    for step in range(steps[0]):
        while steps[active - 1] <= step:
            active -= 1
        flat, y = index[:active, step].reshape(-1), labels[:active, step, :, None]
        error = z.view(-1, classes).index_select(0, flat).view(active, -1, classes)
        near = gram.view(-1, size).index_select(0, flat).view(active, -1, size)
        error = torch.log_softmax(error.baddbmm_(near, a[:active], beta=scale, alpha=-1), 2)
        picked[:active, step] = error.gather(2, y)[:, :, 0]  # log p of every row's own class
        error.exp_().scatter_add_(2, y, minus_one[:active]).mul_(push[:active, step, :, None])  # eta/b (p - 1[y])
        if keep != 1:
            a[:active].mul_(keep)
            scale *= keep
        a.view(-1, classes).index_add_(0, flat, error.view(-1, classes))

    losses = (picked * share).sum((1, 2)).neg_().tolist()
    out: list[Any] = [None] * len(jobs)
    for k, job in enumerate(jobs):
        n, flat = len(rows[k]), like.new_empty(sum(job.w.layout.sizes.values()))
        trained, decayed = Params.from_flat(job.w.layout, {like.dtype: flat}), keep ** steps[k]
        moved = product(a[k, :n].T, rows[k].tensors["features"].T)
        torch.sub(job.w[weight] if keep == 1 else job.w[weight] * decayed, moved, out=trained[weight])
        torch.sub(job.w[bias] * decayed, a[k, :n].sum(0), out=trained[bias])
        out[sequence[k]] = trained, losses[k] / max(steps[k], 1)
    return out
