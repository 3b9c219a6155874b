"""Orders of a batch in BlindFed's "permuted" protocol: index vectors, order[j] = the row at place j.

The paper writes (B Pi)_j = b^{pi(j)}. With Pi_l the order in which block l's states are sent, the client gets the
relative orders Pi_{l-1}^-1 Pi_l: where the rows of list l are in list l - 1.
"""

from __future__ import annotations

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
