"""Join tensors into one vector."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from fedfm.audits.inference.rates import Array


def vector(tensors: Iterable[Tensor]) -> Array:
    """All floating-point entries of the tensors, in order, as float64 (d,)."""
    return np.concatenate([x.detach().double().numpy().ravel() for x in tensors if x.is_floating_point()])
