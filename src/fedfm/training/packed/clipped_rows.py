"""Sums of clipped gradients of single rows, for DP-SGD of the models that :mod:`fedfm.training.packed` supports.

The backward pass is the same as in training, except that the gradient of a trained matrix is computed for each row.
LoRA and heads are so small that the gradients of all rows fit into memory. The norms are computed from these gradients.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Rows
from fedfm.models.model import Model
from fedfm.training.packed import attention
from fedfm.training.packed.batch import Batch
from fedfm.training.packed.net import Net
from fedfm.training.packed.prefix import Cache
from fedfm.training.packed.trainer import fill
from fedfm.training.row_gradients import factors

_NUMBERS = 2**25  # largest number of values in all row gradients of one pass


class RowGradients:
    """Gradients of a client's rows. Each call uses the parameters that the model has then.

    Args:
        rows: the client's rows, with labels.
        fast: whether to use compiled attention if it supports the model.
    """

    def __init__(self, model: Model, net: Net, cache: Cache, rows: Rows, fast: bool) -> None:
        self._model, self._net, self._labels = model, net, rows.labels
        self._prefix = cache.get(net, rows)
        self._fused = fast and attention.fits(net.width, net.layers[0].heads)

    def clipped_sum(self, index: np.ndarray, clip_norm: float) -> Tensor:
        """The sum (P,) of the rows' gradients, each scaled down to L2 norm C, in the order of ``model.live()``."""
        net, live = self._net, self._model.live()
        with torch.no_grad():
            p, total = torch.empty(net.flat.size), torch.zeros(net.flat.size)
            fill(net, p, live)
            most = max(_NUMBERS // net.flat.size, 1)
            for at in range(0, len(index), most):
                total += self._sum(p, index[at : at + most], clip_norm)
            views = net.flat.views(total)
            return torch.cat([net.flat.tensor(name, views).reshape(-1) for name in live])

    def _sum(self, p: Tensor, index: np.ndarray, clip_norm: float) -> Tensor:
        net, labels = self._net, self._labels
        assert labels is not None
        rows = torch.zeros(len(index), net.flat.size)
        batch = Batch(net, [self._prefix], [index], [net.flat.views(p)], [net.flat.views(rows)], self._fused, True)
        batch.descend([labels[torch.from_numpy(index)]])
        c = factors(rows.square().sum(1), clip_norm)
        return c @ rows if c.all() else torch.where(c[:, None] > 0, rows * c[:, None], 0.0).sum(0)
