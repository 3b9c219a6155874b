"""Vectors in fewer bytes: float32 entries as bfloat16, or as 8-bit multiples of a step, with one step per block.

With ``int8`` a block of :data:`BLOCK` entries of one tensor has the step s = max |x| / 127, and an entry is rounded to
the nearest multiple of s (half to even): the error is at most s / 2 = max |x| / 254. With ``bfloat16`` an entry is
rounded to eight significant bits, half to even: the error is at most |x| / 256.

Steps for blocks are from: 8-bit Optimizers via Block-wise Quantization. Dettmers, Lewis, Shleifer, Zettlemoyer. ICLR
2022. arXiv:2110.02861. A large entry increases the error in its own block only.

A tensor may be coded as the difference to a start value that sender and receiver both have. The change by training is
far smaller than the weights, and so is the error of coding it. Every operation is elementwise or a maximum, so that
all machines compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Layout, Params, layout_sent
from fedfm.linalg.precisions import BFLOAT16, INT8

BLOCK = 256  # entries that share one step; the steps add 1.6 % to the bytes
CODES = {BFLOAT16: torch.bfloat16, INT8: torch.int8}
STEPS = "+steps"  # name of the entry with the steps of all blocks, tensor by tensor
_LEVELS = 127
_PIECE = BLOCK << 12  # entries that are coded at a time, so that temporary memory is small


@dataclass
class Error:
    """The error of coding, over all entries so far.

    Attributes:
        largest: largest absolute difference.
        squares: sum of the squared differences.
        count: number of entries.

    Example:
        >>> error = Error()
        >>> error.add(Error(0.5, 0.25, 1))
        >>> error.add(Error(0.0, 0.0, 3))
        >>> error.largest, error.rms
        (0.5, 0.25)
    """

    largest: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, other: Error) -> None:
        """Add the error of other entries."""
        self.largest = max(self.largest, other.largest)
        self.squares, self.count = self.squares + other.squares, self.count + other.count

    @property
    def rms(self) -> float:
        """Root of the mean squared difference."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class Coded(NamedTuple):
    """A coded vector, as it is sent.

    Attributes:
        values: the coded tensors by name; with int8 also the steps, under the name :data:`STEPS`.
        relative: for each coded tensor, "1" if it is the difference to the start, else "0".
        error: the error of coding this vector.
    """

    values: Params
    relative: str
    error: Error


def can_code(layout: Layout) -> bool:
    """Whether a vector has float32 matrices, and no entry that already looks coded."""
    coded = layout.sizes.keys() & CODES.values() or STEPS in layout.slots
    return not coded and any(_is_matrix(dtype, shape) for _, dtype, shape in layout.entries)


def code(x: Params, name: str, start: Params | None = None) -> Coded:
    """The vector with its float32 tensors of two or more dimensions as bfloat16 or int8.

    Other tensors stay as they are. Biases and norms take few bytes, and a model is sensitive to their values; an error
    could even make a running variance negative. If ``start`` has a tensor of the same name and shape, the difference is
    coded, provided that its largest absolute value is below that of the tensor.

    Args:
        name: the code, ``bfloat16`` or ``int8``.

    Raises:
        ValueError: the vector cannot be coded (see :func:`can_code`).
    """
    if not can_code(x.layout):
        raise ValueError("cannot code a vector that has no float32 matrices or is already coded")
    kind, error, relative = CODES[name], Error(), ""
    tensors, steps = dict[str, Tensor](), list[Tensor]()
    for key, dtype, shape in x.layout.entries:
        tensors[key] = flat = x[key].view(-1)
        if not _is_matrix(dtype, shape):
            continue
        base = _base(key, shape, start)
        near = base is not None and _distance(flat, base) < _distance(flat, None)
        base, relative = base if near else None, relative + "01"[near]
        tensors[key] = out = torch.empty(len(flat), dtype=kind)
        for part in _pieces(len(flat)):
            of = None if base is None else base[part]
            out[part], step = _encode(flat[part] if of is None else flat[part] - of, kind)
            steps.append(step)
            missed = flat[part] - _decode(out[part], step, of)
            error.add(Error(_largest(missed), float(missed.double().square_().sum()), len(missed)))
    shaped = {key: flat.view(x[key].shape) for key, flat in tensors.items()}
    return Coded(
        Params(shaped | ({STEPS: torch.cat([torch.empty(0), *steps])} if kind is torch.int8 else {})), relative, error
    )


def decode(values: Params, relative: str, start: Params | None = None) -> Params:
    """The vector that :func:`code` approximates, with the same ``start``.

    Raises:
        ValueError: ``values`` do not have the form of a coded vector, or ``start`` lacks a tensor that they need.
    """
    kinds = [kind for kind in CODES.values() if kind in values.layout.sizes]
    if len(kinds) != 1 or (kinds[0] is torch.int8) != (STEPS in values):
        raise ValueError("the message marks its parameters as coded, but they are not")
    (kind,), flags, at = kinds, iter(relative), 0
    steps = values[STEPS] if kind is torch.int8 else torch.empty(0)
    coded = [math.prod(shape) for _, dtype, shape in values.layout.entries if dtype is kind]
    expected = sum(-(-count // BLOCK) for count in coded) if kind is torch.int8 else 0
    if steps.dtype is not torch.float32 or steps.shape != (expected,):
        raise ValueError(f"coded parameters have {steps.numel()} steps, expected {expected}")
    if len(relative) != len(coded) or set(relative) - set("01"):
        raise ValueError("coded parameters do not say which of their tensors are differences")
    entries = [entry for entry in values.layout.entries if entry[0] != STEPS]
    layout = layout_sent(tuple((key, torch.float32 if d is kind else d, shape) for key, d, shape in entries))
    flats = {dtype: buffers.empty(size, dtype) for dtype, size in layout.sizes.items()}
    for key, dtype, shape in entries:
        to, begin, end, _ = layout.slots[key]
        flat, out = values[key].view(-1), flats[to][begin:end]
        if dtype is not kind:
            out.copy_(flat)
            continue
        base = _base(key, shape, start)
        if (near := next(flags) == "1") and base is None:
            raise ValueError(f"{key} is coded as a difference to a tensor that the receiver does not have")
        for part in _pieces(len(flat)):
            count = -(-(part.stop - part.start) // BLOCK) if kind is torch.int8 else 0
            out[part] = _decode(flat[part], steps[at : at + count], base[part] if near and base is not None else None)
            at += count
    return Params.from_flat(layout, flats)


def _is_matrix(dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return dtype is torch.float32 and len(shape) > 1


def _encode(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """(coded entries (n,), steps of their blocks). A NaN or infinity makes its whole block NaN or infinite."""
    if kind is not torch.int8:
        return x.to(kind), torch.empty(0)
    blocks = torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    steps = torch.linalg.vector_norm(blocks, ord=math.inf, dim=1) / _LEVELS
    whole = blocks.div(torch.where(steps > 0, steps, 1.0)[:, None]).round_()
    return whole.nan_to_num_(0, 0, 0).clamp_(-_LEVELS, _LEVELS).to(kind).view(-1)[: len(x)], steps


def _decode(coded: Tensor, steps: Tensor, base: Tensor | None) -> Tensor:
    """The decoded entries (n,), float32."""
    x = coded.float()
    if coded.dtype is torch.int8:
        x = torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK).mul_(steps[:, None]).view(-1)[: len(x)]
    return x if base is None else x + base


def _base(name: str, shape: tuple[int, ...], start: Params | None) -> Tensor | None:
    """The tensor of this name in ``start``, as a vector; None if it is absent or has another shape or dtype."""
    if start is None or start.layout.slots.get(name, (None,) * 4)[::3] != (torch.float32, shape):
        return None
    return start[name].view(-1)


def _pieces(count: int) -> Iterator[slice]:
    return (slice(at, min(at + _PIECE, count)) for at in range(0, count, _PIECE))


def _largest(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, ord=math.inf))


def _distance(x: Tensor, base: Tensor | None) -> float:
    """Largest |x - base|, or |x| without a base."""
    return max((_largest(x[at] if base is None else x[at] - base[at]) for at in _pieces(len(x))), default=0.0)
