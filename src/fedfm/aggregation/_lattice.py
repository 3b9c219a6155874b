"""Bounded updates and noise as integer multiples of a step, so that sums are exact and float bits disclose nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedfm.errors import E_NONFINITE, ClientFault
from fedfm.linalg.params import Layout, Params
from fedfm.privacy import noise

Steps = NDArray[np.int64]  # a vector of R^P as multiples of the lattice's step

_LATTICE_BITS = 20  # clip_norm is 2^20 to 2^21 steps, so float32 represents all lattice points up to clip_norm exactly
_MARGIN = 2.0**-40  # relative margin, far above the rounding error of a norm in float64


def step_of(clip_norm: float) -> float:
    """Distance between neighbouring lattice points: a power of two, 2^-21 to 2^-20 of the clipping norm."""
    return 2.0 ** (math.frexp(clip_norm)[1] - 1 - _LATTICE_BITS)


def clip_to_lattice(delta: Params, clip_norm: float, unit: float = 1.0) -> Steps:
    """Clip the vector of all floating-point entries, and round it towards zero to the lattice.

    The result, multiplied by :func:`step_of`, has an L2 norm of at most ``clip_norm``. A second call changes nothing.

    Args:
        unit: the entries are divided by this number before clipping.

    Raises:
        ClientFault: E_NONFINITE, an entry is NaN or infinite.
    """
    x = flat_of(delta)
    norm = norm_of(x) / unit
    factor = 1 / step_of(clip_norm)
    if norm > clip_norm * (1 - _MARGIN):
        factor *= clip_norm * (1 - 2 * _MARGIN) / norm
    return np.trunc(x * (factor / unit)).astype(np.int64)


def norm_of(x: NDArray[np.float64]) -> float:
    """The L2 norm of x.

    Raises:
        ClientFault: E_NONFINITE, an entry is NaN or infinite.
    """
    norm = math.sqrt(float(x @ x))
    if not math.isfinite(norm):
        raise ClientFault(E_NONFINITE, "the update has NaN or infinity")
    return norm


def add_noise(key: bytes, purpose: str, steps: Steps, scale: float) -> Steps:
    """The integers plus rounded normal noise with the standard deviation ``scale``.

    A repeated round gets the same noise. A round with other numbers gets other noise.
    """
    return np.asarray(noise.cover(key, f"client level/{purpose}", steps, scale))


def flat_of(delta: Params) -> NDArray[np.float64]:
    """All floating-point entries as one vector (P,)."""
    flats = [flat.double().numpy() for dtype, flat in delta.flats.items() if dtype.is_floating_point]
    return flats[0] if len(flats) == 1 else np.concatenate([*flats, np.zeros(0)])


def on_layout(layout: Layout, values: NDArray[np.floating[Any]]) -> Params:
    """Values (P,) in a layout of one floating-point type; other entries are 0."""
    flats = {
        dtype: torch.from_numpy(values).to(dtype) if dtype.is_floating_point else torch.zeros(size, dtype=dtype)
        for dtype, size in layout.sizes.items()
    }
    return Params.from_flat(layout, flats)
