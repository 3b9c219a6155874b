"""Self-attention over a packed batch: sequences of several lengths, one after the other, without padding.

torch's batched products compute sequences of similar length together. Compiled loops (``fused``) take at most half the
time and round differently.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfm.training.packed.linear import softmax_backward

_MULTIPLE = 16  # torch's softmax over fewer than 16 entries is ten times slower than over 16


@dataclass(frozen=True)
class _Group:
    """Sequences that are computed together, each padded to ``length`` positions.

    Attributes:
        take: (S * length,) the batch's row for each position, at padding a row whose gradient is zero; None: all rows.
        bias: (S, 1, 1, length): 0 at tokens, minus infinity at padding; None without padding.
        sequences: (S,) index of each sequence; None if the group has all sequences.
    """

    count: int
    length: int
    take: Tensor | None = None
    bias: Tensor | None = None
    sequences: Tensor | None = None


class Shape:
    """The sequences of one packed batch.

    Attributes:
        rows: number of rows of the batch, including the padding at its end.
        tokens: number of rows without the padding.
        first: (S,) row of each sequence's first token.
        equal: the common length of all sequences, or 0.
        fused: whether to use compiled loops.
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
            self.groups.append(_Group(len(lengths), self.equal))
            return
        # Add at least one row of padding. Row counts are multiples of 16: oneDNN compiles a kernel for each count.
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


# For each group: q, k, v (S H, T, d / H) and probabilities (S H, T, T). Fused loops keep q, kv and all probabilities.
Saved = list[tuple[Tensor, ...]]


def fits(width: int, heads: int) -> bool:
    """Whether the compiled loops support heads of this size."""
    from fedfm.linalg.kernels.simd import COUNT

    return width % heads == 0 and (width // heads) % COUNT == 0


def _split(x: Tensor, parts: int, group: _Group, heads: int) -> Tensor:
    """The group's rows of (N, parts d) -> (parts, S H, T, d / H)."""
    x, count, length, size = _select(x, group.take), group.count, group.length, x.shape[1] // (parts * heads)
    return x.view(count, length, parts, heads, size).permute(2, 0, 3, 1, 4).reshape(parts, count * heads, length, size)


def _merge(x: Tensor, count: int, heads: int) -> Tensor:
    """(parts, S H, T, d / H) -> (S T, parts d)."""
    parts, _, length, size = x.shape
    return (
        x.view(parts, count, heads, length, size).permute(1, 3, 0, 2, 4).reshape(count * length, parts * heads * size)
    )


def _softmax(scores: Tensor, group: _Group, heads: int) -> Tensor:
    if group.bias is not None:
        scores.view(group.count, heads, *scores.shape[1:]).add_(group.bias)
    return torch.softmax(scores, 2)


def _select(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(0, index)


def _place(x: Tensor, group: _Group, out: Tensor) -> Tensor:
    """Put the rows x of the group's sequences into ``out``; return x itself if the group has all sequences."""
    return x if group.sequences is None else out.index_copy_(0, group.sequences, x)


def forward(qkv: Tensor, shape: Shape, heads: int) -> tuple[Tensor, Saved]:
    """(N, 3d) -> (N, d). The queries are already scaled by 1 / sqrt(d / H)."""
    if shape.fused:
        return _attend(qkv, qkv, shape, heads)
    outs, saved = [], Saved()
    for group in shape.groups:
        q, k, v = _split(qkv, 3, group, heads)
        p = _softmax(torch.bmm(q, k.transpose(1, 2)), group, heads)
        outs.append(_merge(torch.bmm(p, v)[None], group.count, heads))
        saved.append((q, k, v, p))
    return (outs[0] if shape.equal else torch.cat(outs).index_select(0, shape.back)), saved


def backward(gradient: Tensor, saved: Saved, shape: Shape, heads: int) -> Tensor:
    """dL/dout (N, d) -> dL/dqkv (N, 3d); both are zero in rows without a token."""
    if shape.fused:
        return _fused_backward(gradient, saved, shape, heads)[1]
    outs = []
    for group, (q, k, v, p) in zip(shape.groups, saved, strict=True):
        g = _split(gradient, 1, group, heads)[0]
        out = q.new_empty(3, *q.shape)
        torch.bmm(p.transpose(1, 2), g, out=out[2])
        ds = softmax_backward(torch.bmm(g, v.transpose(1, 2)), p, 2, torch.float32)
        torch.bmm(ds, k, out=out[0])
        torch.bmm(ds.transpose(1, 2), q, out=out[1])
        outs.append(_merge(out, group.count, heads))
    return outs[0] if shape.equal else _scatter(outs, shape)


def forward_first(q: Tensor, kv: Tensor, shape: Shape, heads: int) -> tuple[Tensor, Saved]:
    """Attention with the query of each sequence's first token only: q (S, d), kv (N, 2d) -> (S, d)."""
    if shape.fused:
        return _attend(q, kv, shape, heads)
    out, saved = torch.empty_like(q), Saved()
    for group in shape.groups:
        k, v = _split(kv, 2, group, heads)
        ask = _select(q, group.sequences).reshape(group.count * heads, 1, -1)
        p = _softmax(torch.bmm(ask, k.transpose(1, 2)), group, heads)
        out = _place(torch.bmm(p, v).view(group.count, -1), group, out)
        saved.append((ask, k, v, p))
    return out, saved


def backward_first(gradient: Tensor, saved: Saved, shape: Shape, heads: int) -> tuple[Tensor, Tensor]:
    """dL/dout (S, d) -> dL/dq (S, d), dL/dkv (N, 2d)."""
    if shape.fused:
        return _fused_backward(gradient, saved, shape, heads)
    dq, outs = torch.empty_like(gradient), []
    for group, (q, k, v, p) in zip(shape.groups, saved, strict=True):
        g = _select(gradient, group.sequences).reshape(group.count * heads, 1, -1)
        out = k.new_empty(2, *k.shape)
        torch.bmm(p.transpose(1, 2), g, out=out[1])
        ds = softmax_backward(torch.bmm(g, v.transpose(1, 2)), p, 2, torch.float32)
        torch.bmm(ds.transpose(1, 2), q, out=out[0])
        dq = _place(torch.bmm(ds, k).view(group.count, -1), group, dq)
        outs.append(_merge(out, group.count, heads))
    return dq, outs[0] if shape.equal else _scatter(outs, shape)


def _scatter(outs: list[Tensor], shape: Shape) -> Tensor:
    packed = (torch.cat(outs) if len(outs) > 1 else outs[0]).index_select(0, shape.back)
    packed[shape.tokens :] = 0
    return packed


def _attend(q: Tensor, kv: Tensor, shape: Shape, heads: int) -> tuple[Tensor, Saved]:
    """Attention in compiled loops. If each token has a query, ``q`` and ``kv`` are the same tensor (N, 3d)."""
    from fedfm.training.packed import fused

    single, d = q is not kv, kv.shape[1] // (3 if q is kv else 2)
    out = torch.empty(len(q), d)
    out[len(shape.lengths) if single else shape.tokens :] = 0
    p = torch.empty(fused.entries(shape.lengths, single, heads))
    flat_q, flat_kv = q.numpy().reshape(-1), kv.numpy().reshape(-1)
    places = flat_q, q.shape[1], flat_kv, kv.shape[1], *((0, d) if single else (d, 2 * d))
    scratch = np.empty(d // heads * fused.round_up(int(shape.lengths.max())), np.float32)
    fused.forward(*places, shape.lengths, single, heads, d // heads, out.numpy().reshape(-1), p.numpy(), scratch)
    return out, [(q, kv, p)]


def _fused_backward(gradient: Tensor, saved: Saved, shape: Shape, heads: int) -> tuple[Tensor, Tensor]:
    """Gradients of the inputs q and kv of :func:`_attend`; if q is kv, both are the same tensor."""
    from fedfm.training.packed import fused

    ((q, kv, p),) = saved
    single, d = q is not kv, gradient.shape[1]
    dkv = torch.empty_like(kv)
    dkv[shape.tokens :] = 0
    dq = torch.empty_like(q) if single else dkv
    flat_q, flat_kv = q.numpy().reshape(-1), kv.numpy().reshape(-1)
    places = flat_q, q.shape[1], flat_kv, kv.shape[1], *((0, d) if single else (d, 2 * d))
    longest = int(shape.lengths.max())
    scratch = np.empty(d // heads * fused.round_up(longest), np.float32)
    scores = np.empty((1 if single else longest) * fused.round_up(longest), np.float32)
    outs = dq.numpy().reshape(-1), dkv.numpy().reshape(-1)
    flat = gradient.numpy().reshape(-1)
    fused.backward(flat, *places, shape.lengths, single, heads, d // heads, p.numpy(), *outs, scratch, scores)
    return dq, dkv
