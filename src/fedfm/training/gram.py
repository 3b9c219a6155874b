"""Linear heads trained in the span of a client's own rows, where that is cheaper than in the space of the weights.

Plain SGD moves W only along the features x_i of the client, so that W_t = s_t W_0 - A_t^T X with one coefficient a row
and class, A_t (n, C), and s_t the product of the weight decays. A batch's logits are then

    X_b W_t^T = s_t (X_b W_0^T) - (X_b X^T) A_t,

rows of two products that are computed once, X W_0^T and the Gram matrix X X^T. A step costs b n C multiply-adds
instead of b d C twice, which pays over several epochs of fewer rows than features. The bias is one more feature
that is always 1.
"""

from __future__ import annotations

import numpy as np
import torch

from fedfm.params import Params
from fedfm.training import SGD
from fedfm.training.ahead import loops
from fedfm.training.job import Job
from fedfm.training.packed.linear import product

_FIXED = 1 << 20  # multiply-adds that take as long as the calls around the products
_LANES = 16  # float32 numbers in 64 bytes


def pays(job: Job, n: int, classes: int, width: int) -> bool:
    """Fewer multiplications than steps on the weights; decided by what the client itself holds."""
    local = job.local
    if not isinstance(local, SGD) or local.momentum or job.mu or job.correction is not None:
        return False  # the change of the weights is no fixed multiple of the batch's features
    whole, steps = n * n * width + 2 * n * width * classes, (local.epochs - 0.5) * n * n * classes
    return whole + steps + _FIXED < 2 * local.epochs * n * width * classes


def train(job: Job, x: np.ndarray, y: np.ndarray, weight: str, bias: str) -> tuple[Params, float]:
    """The trained head and the mean loss over its batches, from features (n, d) and labels (n,)."""
    descent = loops()
    local, layout, n, features = job.local, job.w.layout, len(y), torch.from_numpy(x)
    first = product(features, job.w[weight], job.w[bias])  # X W_0^T + b_0
    gram = product(features, features).add_(1)  # X X^T + 1
    width = -(-first.shape[1] // _LANES) * _LANES
    a = torch.zeros(n, width)
    eta, decay = local.learning_rate, local.weight_decay
    room = descent.scratch(min(local.batch_size, n), width)
    loss = descent.descend_in_span(
        first.numpy(), gram.numpy(), a.numpy(), y, job.epochs(descent.generator), local.batch_size, eta, decay, *room
    )
    flat = torch.empty(layout.sizes[torch.float32])
    trained, decayed = Params.from_flat(layout, {torch.float32: flat}), (1 - eta * decay) ** local.steps(n)
    moved = a[:, : first.shape[1]]
    torch.sub(job.w[weight] * decayed if decay else job.w[weight], product(moved.T, features.T), out=trained[weight])
    torch.sub(job.w[bias] * decayed, moved.sum(0), out=trained[bias])
    return trained, loss
