"""Orders of a batch in BlindFed's "permuted" protocol: index vectors, order[j] = the row at place j.

The paper writes (B Pi)_j = b^{pi(j)}. With Pi_l the order in which block l's states are sent, the client gets the
relative orders Pi_{l-1}^-1 Pi_l: where the rows of list l are in list l - 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedfm.errors import E_FIELD, ClientFault, InputError
from fedfm.privacy.noise import stream


def check(order: Tensor) -> None:
    """Refuse what is no order.

    Raises:
        ClientFault: with what it is.
    """
    if order.dim() != 1 or sorted(order.tolist()) != list(range(len(order))):
        raise ClientFault(E_FIELD, "an order names every row once; this one does not")


def draw(n: int, key: bytes, purpose: str) -> Tensor:
    """A uniform order of n rows, from a ChaCha20 stream for this purpose: a repeated batch has the same.

    Raises:
        InputError: fewer than 2 rows have one order only.
    """
    if n < 2:
        raise InputError(f'protocol = "permuted": a batch of {n} rows has no secret order; expected at least 2')
    words = np.frombuffer(stream(key, f"orders/{purpose}", 8 * n), dtype="<u8")
    return torch.from_numpy(np.argsort(words, kind="stable"))


def draw_all(key: bytes, client: str, batch: int, blocks: int, n: int) -> list[Tensor]:
    """Pi_1 ... Pi_{L+1} of a batch; a batch that is computed again has the same."""
    return [draw(n, key, f"{client}/{batch}/{level}") for level in range(1, blocks + 2)]


def steps(pi: Sequence[Tensor]) -> Tensor:
    """What the client is sent of Pi_1 ... Pi_{L+1}: Pi_{l-1}^-1 Pi_l, then Pi_L^-1 Pi_1 for H_0 = B_L: (L + 1, n)."""
    return torch.stack([*(relative(a, b) for a, b in itertools.pairwise(pi)), relative(pi[-2], pi[0])])


def relative(before: Tensor, after: Tensor) -> Tensor:
    """Pi_before^-1 Pi_after: for each place of the later list, the place of its row in the earlier one."""
    check(before)
    check(after)
    return torch.argsort(before)[after]


def to_last(lists: Sequence[Tensor], relatives: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """All lists in the order of the last one, Pi_{L+1}.

    Args:
        lists: L of them, list l in order Pi_l.
        relatives: L + 1: Pi_1^-1 Pi_2, ..., Pi_L^-1 Pi_{L+1}, and Pi_L^-1 Pi_1 (which the client's chain starts with).
    """
    out = []
    for level in range(len(lists)):
        x = lists[level]
        for step in relatives[level : len(lists)]:
            x = x[step]
        out.append(x)
    return out
