"""Self-attention over a packed batch: sequences of several lengths, one below the other, without padding.

By torch's batched products, sequences of like length together; or in compiled loops (``fused``), which take half the
time or less and round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfm.training.packed.linear import softmax_backward

_MULTIPLE = 16  # torch's softmax over fewer than 16 entries is ten times slower than over 16


@dataclass(frozen=True)
class _Group:
    """Sequences attended together, each padded to ``length`` positions.

    Attributes:
        take: (S * length,) row of every position; a padded one takes a row whose gradient is zero.
        bias: (S, 1, 1, length): 0, and minus infinity at padding; None without padding.
        sequences: (S,) number of each sequence among all.
    """

    count: int
    length: int
    take: Tensor
    bias: Tensor | None
    sequences: Tensor


class Shape:
    """How the rows of one packed batch fall into sequences.

    Attributes:
        rows: rows of the batch, the padding at its end included.
        tokens: rows that carry a token.
        first: (S,) row of each sequence's first token.
        equal: the one length of all sequences, or 0 where they differ.
        fused: attend in compiled loops.
    """

    def __init__(self, lengths: np.ndarray, fused: bool = False) -> None:
        self.lengths, self.fused = lengths, fused
        self.tokens = int(lengths.sum())
        starts = np.cumsum(lengths) - lengths
        self.first = torch.from_numpy(starts)
        self.equal = int(lengths[0]) if (lengths == lengths[0]).all() else 0
        self.groups: list[_Group] = []
        if self.equal:
            self.rows = self.tokens
            return
        # At least one row of padding; and few distinct row counts, since oneDNN compiles a kernel for each.
        self.rows = -(-(self.tokens + 1) // 16) * 16
        if fused:
            return
        padded = -(-lengths // _MULTIPLE) * _MULTIPLE
        back = np.zeros(self.rows, dtype=np.int64)
        offset = 0
        for length in np.unique(padded):
            members = np.flatnonzero(padded == length)
            position = np.arange(length)
            inside = position < lengths[members][:, None]  # (S, length)
            take = np.where(inside, starts[members][:, None] + position, self.tokens)
            back[take[inside]] = offset + np.flatnonzero(inside.reshape(-1))
            offset += take.size
            bias = torch.zeros(inside.shape).masked_fill_(torch.from_numpy(~inside), -torch.inf)
            self.groups.append(
                _Group(
                    len(members),
                    int(length),
                    torch.from_numpy(take.reshape(-1)),
                    None if inside.all() else bias[:, None, None],
                    torch.from_numpy(members),
                )
            )
        self.back = torch.from_numpy(back)

    def all_groups(self) -> Sequence[_Group | None]:
        """None stands for: all rows as they are."""
        return self.groups or (None,)


# Of each group q, k, v (S H, T, d / H), probabilities (S H, T, T); fused: q and kv as they came, all probabilities.
Saved = list[tuple[Tensor, ...]]


def fits(width: int, heads: int) -> bool:
    """Whether the compiled loops take heads of this size."""
    from fedfm.linalg.kernels.simd import COUNT

    return width % heads == 0 and (width // heads) % COUNT == 0


def _split(x: Tensor, parts: int, count: int, length: int, heads: int) -> Tensor:
    """(S T, parts d) -> (parts, S H, T, d / H)."""
    size = x.shape[1] // (parts * heads)
    return x.view(count, length, parts, heads, size).permute(2, 0, 3, 1, 4).reshape(parts, count * heads, length, size)


def _merge(x: Tensor, count: int, heads: int) -> Tensor:
    """(parts, S H, T, d / H) -> (S T, parts d)."""
    parts, _, length, size = x.shape
    return (
        x.view(parts, count, heads, length, size).permute(1, 3, 0, 2, 4).reshape(count * length, parts * heads * size)
    )


def _softmax(scores: Tensor, bias: Tensor | None, count: int, heads: int) -> Tensor:
    if bias is not None:
        scores.view(count, heads, *scores.shape[1:]).add_(bias)
    return torch.softmax(scores, 2)


def forward(qkv: Tensor, shape: Shape, heads: int) -> tuple[Tensor, Saved]:
    """(N, 3d) -> (N, d). Queries come already scaled by 1 / sqrt(d / H)."""
    if shape.fused:
        return _fused(qkv, qkv, shape, heads)
    outs, saved = [], Saved()
    for group in shape.all_groups():
        rows, count, length = _gathered(qkv, group, shape)
        q, k, v = _split(rows, 3, count, length, heads)
        p = _softmax(torch.bmm(q, k.transpose(1, 2)), None if group is None else group.bias, count, heads)
        outs.append(_merge(torch.bmm(p, v)[None], count, heads))
        saved.append((q, k, v, p))
    return (outs[0] if shape.equal else torch.cat(outs).index_select(0, shape.back)), saved


def backward(gradient: Tensor, saved: Saved, shape: Shape, heads: int) -> Tensor:
    """dL/dout (N, d), zero in rows without a token -> dL/dqkv (N, 3d), zero there too."""
    if shape.fused:
        return _fused_backward(gradient, saved, shape, heads)[1]
    outs = []
    for group, (q, k, v, p) in zip(shape.all_groups(), saved, strict=True):
        rows, count, length = _gathered(gradient, group, shape)
        g = _split(rows, 1, count, length, heads)[0]
        out = q.new_empty(3, *q.shape)
        torch.bmm(p.transpose(1, 2), g, out=out[2])
        ds = softmax_backward(torch.bmm(g, v.transpose(1, 2)), p, 2, torch.float32)
        torch.bmm(ds, k, out=out[0])
        torch.bmm(ds.transpose(1, 2), q, out=out[1])
        outs.append(_merge(out, count, heads))
    return outs[0] if shape.equal else _scattered(outs, shape)


def forward_first(q: Tensor, kv: Tensor, shape: Shape, heads: int) -> tuple[Tensor, Saved]:
    """Of each sequence only the first token asks: q (S, d), kv (N, 2d) -> (S, d)."""
    if shape.fused:
        return _fused(q, kv, shape, heads)
    out, saved = torch.empty_like(q), Saved()
    for group in shape.all_groups():
        rows, count, length = _gathered(kv, group, shape)
        k, v = _split(rows, 2, count, length, heads)
        ask = q if group is None else q.index_select(0, group.sequences)
        ask = ask.reshape(count * heads, 1, -1)
        p = _softmax(torch.bmm(ask, k.transpose(1, 2)), None if group is None else group.bias, count, heads)
        answer = torch.bmm(p, v).view(count, -1)
        if group is None:
            out = answer
        else:
            out.index_copy_(0, group.sequences, answer)
        saved.append((ask, k, v, p))
    return out, saved


def backward_first(gradient: Tensor, saved: Saved, shape: Shape, heads: int) -> tuple[Tensor, Tensor]:
    """dL/dout (S, d) -> dL/dq (S, d), dL/dkv (N, 2d)."""
    if shape.fused:
        return _fused_backward(gradient, saved, shape, heads)
    dq, outs = torch.empty_like(gradient), []
    for group, (q, k, v, p) in zip(shape.all_groups(), saved, strict=True):
        count = len(shape.lengths) if group is None else group.count
        g = gradient if group is None else gradient.index_select(0, group.sequences)
        g = g.reshape(count * heads, 1, -1)
        out = k.new_empty(2, *k.shape)
        torch.bmm(p.transpose(1, 2), g, out=out[1])
        ds = softmax_backward(torch.bmm(g, v.transpose(1, 2)), p, 2, torch.float32)
        torch.bmm(ds.transpose(1, 2), q, out=out[0])
        answer = torch.bmm(ds, k).view(count, -1)
        if group is None:
            dq = answer
        else:
            dq.index_copy_(0, group.sequences, answer)
        outs.append(_merge(out, count, heads))
    return dq, outs[0] if shape.equal else _scattered(outs, shape)


def _gathered(x: Tensor, group: _Group | None, shape: Shape) -> tuple[Tensor, int, int]:
    if group is None:
        return x, len(shape.lengths), shape.equal
    return x.index_select(0, group.take), group.count, group.length


def _scattered(outs: list[Tensor], shape: Shape) -> Tensor:
    packed = (torch.cat(outs) if len(outs) > 1 else outs[0]).index_select(0, shape.back)
    packed[shape.tokens :] = 0
    return packed


def _fused(q: Tensor, kv: Tensor, shape: Shape, heads: int) -> tuple[Tensor, Saved]:
    """Attention in compiled loops; ``q`` is ``kv`` where every token asks."""
    from fedfm.training.packed import fused

    single, d = q is not kv, kv.shape[1] // (3 if q is kv else 2)
    out = torch.empty(len(q), d)
    out[len(shape.lengths) if single else shape.tokens :] = 0
    p = torch.empty(fused.entries(shape.lengths, single, heads))
    flat_q, flat_kv = q.numpy().reshape(-1), kv.numpy().reshape(-1)
    places = flat_q, q.shape[1], flat_kv, kv.shape[1], *((0, d) if single else (d, 2 * d))
    room = np.empty(d // heads * fused.padded(int(shape.lengths.max())), np.float32)
    fused.forward(*places, shape.lengths, single, heads, d // heads, out.numpy().reshape(-1), p.numpy(), room)
    return out, [(q, kv, p)]


def _fused_backward(gradient: Tensor, saved: Saved, shape: Shape, heads: int) -> tuple[Tensor, Tensor]:
    """Gradients of the two tensors that :func:`_fused` was given, one and the same where these were."""
    from fedfm.training.packed import fused

    ((q, kv, p),) = saved
    single, d = q is not kv, gradient.shape[1]
    dkv = torch.empty_like(kv)
    dkv[shape.tokens :] = 0
    dq = torch.empty_like(q) if single else dkv
    flat_q, flat_kv = q.numpy().reshape(-1), kv.numpy().reshape(-1)
    places = flat_q, q.shape[1], flat_kv, kv.shape[1], *((0, d) if single else (d, 2 * d))
    longest = int(shape.lengths.max())
    room = np.empty(d // heads * fused.padded(longest), np.float32)
    scores = np.empty((1 if single else longest) * fused.padded(longest), np.float32)
    outs = dq.numpy().reshape(-1), dkv.numpy().reshape(-1)
    flat = gradient.numpy().reshape(-1)
    fused.backward(flat, *places, shape.lengths, single, heads, d // heads, p.numpy(), *outs, room, scores)
    return dq, dkv
