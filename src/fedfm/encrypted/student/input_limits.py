"""Limits of a student's pictures, by which a client finds unlike ones before it encrypts them.

On ciphertexts one row far outside the polynomials' intervals overflows, and its whole batch with it. The server cannot
see such a row, and the client cannot see the intervals. So the owner publishes, with the student, the largest values of
four simple statistics on the rows on which the intervals were measured. A client computes them on its own pictures, in
the clear. They are figures of the owner's auxiliary pictures, and tell nothing of the weights.

The statistics are those of fine detail and of colour, since nearly all pictures that overflowed had more of one of them
than the measured ones: noise, thresholded photographs, lines of one pixel and pure colours, and not inverted or blank
pictures. It is a test, not a proof: a picture within the limits may still leave an interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedfm.encrypted.student.folding import KEY
from fedfm.models import families

ENTRY = "limits"  # key of the limits in the table of a student's polynomials
_SIDE = 16  # pixels, of the squares in which the finest detail is looked for
_SLACK = 1.001  # sums of another machine may round differently
_BEND = torch.tensor([1.0, -4.0, 6.0, -4.0, 1.0])  # fourth differences: of enlarged pictures they are small


def measure_detail(pixels: Tensor) -> dict[str, Tensor]:
    """Measure pictures (n, 3, H, W) of at least five pixels a side, as they enter the model.

    Returns:
        (n,) each, root mean squares: ``roughness``, of the differences of neighbouring pixels; ``grain``, of fourth
        differences across of fourth differences down, which are 70 times the deviation of white noise; ``detail``, the
        largest grain of a square of 16 x 16 pixels; ``colour``, of the channels' differences from their mean.
    """
    x = pixels.float()
    across, down = x.diff(dim=-1)[..., :-1, :], x.diff(dim=-2)[..., :-1]
    channels = x.flatten(0, 1)[:, None]  # (3 n, 1, H, W)
    fine = functional.conv2d(channels, (_BEND[:, None] * _BEND)[None, None]).square()
    fine = fine.view(*x.shape[:2], *fine.shape[2:]).mean(1)  # (n, H - 4, W - 4)
    squares = functional.avg_pool2d(fine, (min(_SIDE, fine.shape[1]), min(_SIDE, fine.shape[2])), ceil_mode=True)
    return {
        "roughness": (across.square() + down.square()).mean((1, 2, 3)).sqrt(),
        "grain": fine.mean((1, 2)).sqrt(),
        "detail": squares.flatten(1).amax(1).sqrt(),
        "colour": (x - x.mean(1, keepdim=True)).square().mean((1, 2, 3)).sqrt(),
    }


def widen_limits(limits: dict[str, float], pixels: Tensor) -> None:
    """Raise limits, in place, to those of these pictures (n, 3, H, W). Tiny pictures have no limits."""
    if min(pixels.shape[2:]) < len(_BEND):
        return
    for name, x in measure_detail(pixels).items():
        limits[name] = max(limits.get(name, 0.0), float(x.max()))


def limits_of(module: Any) -> dict[str, float]:
    """Return the limits of a student's pictures; empty if it has none, as students of an earlier fedfm."""
    return read_limits(getattr(families.unwrap(module).config, KEY))


def read_limits(table: Mapping[str, Any]) -> dict[str, float]:
    """Read the limits from the table in a student's ``config.json``.

    Raises:
        AttributeError, TypeError, ValueError: they are not numbers by name.
    """
    return {name: float(limit) for name, limit in table.get(ENTRY, {}).items()}


def beyond(pixels: Tensor, limits: Mapping[str, Any]) -> list[str]:
    """For each picture (n, 3, H, W), name the limits that it exceeds, with its values; empty if it exceeds none."""
    if not limits:
        return [""] * len(pixels)
    found = measure_detail(pixels)
    return [
        ", ".join(
            f"{name} {float(x[i]):.3g}, at most {float(limits[name]):.3g}"
            for name, x in found.items()
            if name in limits and not float(x[i]) <= float(limits[name]) * _SLACK
        )
        for i in range(len(pixels))
    ]
