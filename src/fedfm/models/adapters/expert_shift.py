"""Shift the weights of experts by products of factors, in addition to their adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedfm.linalg.low_rank import Factors


@contextmanager
def add_factors(layer: Any, shift: Factors) -> Iterator[None]:
    """Context manager: PEFT's layer of experts adds U_e V_e to W_e, in addition to its adapter.

    Args:
        shift: U (E, d_out, R), V (E, R, d_in).
    """
    own = layer.get_delta_factors

    def with_shift(adapter: str) -> tuple[Tensor, Tensor, float]:
        left, right, scale = own(adapter)
        u, v = (t.to(left.device, left.dtype) for t in (shift[0] / scale, shift[1]))
        if left.shape[1] != u.shape[1] or right.shape[2] != v.shape[2]:  # weights stored as (E, d_in, d_out)
            u, v = v.transpose(1, 2), u.transpose(1, 2)
        return torch.cat([left, u], 2), torch.cat([right, v], 1), scale

    vars(layer)["get_delta_factors"] = with_shift
    try:
        yield
    finally:
        del vars(layer)["get_delta_factors"]
