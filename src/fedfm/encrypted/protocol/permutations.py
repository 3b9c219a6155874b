"""Orders of a batch in BlindFed's "permuted" protocol. An order is an index vector: order[j] is the row at position j.

The paper writes (B Pi)_j = b^{pi(j)}. The states of block l are sent as list l, in the order Pi_l. The client gets
relative orders Pi_{l-1}^-1 Pi_l: for each row of list l, the row's position in list l - 1.
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
    """Raise an error for a vector that is not an order.

    Raises:
        ClientFault: the vector does not name every row exactly once.
    """
    if order.dim() != 1 or sorted(order.tolist()) != list(range(len(order))):
        raise ClientFault(E_FIELD, "expected an order that names every row once")


def draw(n: int, key: bytes, purpose: str) -> Tensor:
    """Draw a uniformly random order of n rows from a ChaCha20 stream, which depends on the key and the purpose.

    If a batch is repeated after a crash, it gets the same order again.

    Raises:
        InputError: there are fewer than 2 rows, so there is only one order.
    """
    if n < 2:
        raise InputError(f'protocol = "permuted": a batch of {n} rows has no secret order; expected at least 2')
    words = np.frombuffer(stream(key, f"orders/{purpose}", 8 * n), dtype="<u8")
    return torch.from_numpy(np.argsort(words, kind="stable"))


def draw_all(key: bytes, client: str, batch: int, blocks: int, n: int) -> list[Tensor]:
    """Draw the orders Pi_1 ... Pi_{L+1} of a batch; a repeated batch gets the same orders."""
    return [draw(n, key, f"{client}/{batch}/{level}") for level in range(1, blocks + 2)]


def steps(pi: Sequence[Tensor]) -> Tensor:
    """Return the relative orders (L + 1, n) for the client.

    They are Pi_{l-1}^-1 Pi_l for l = 2 ... L + 1, and then Pi_L^-1 Pi_1, which reorders H_0 = B_L, the adapters' input.
    """
    return torch.stack([*(relative(a, b) for a, b in itertools.pairwise(pi)), relative(pi[-2], pi[0])])


def relative(before: Tensor, after: Tensor) -> Tensor:
    """Return Pi_before^-1 Pi_after: for each position of the later list, its row's position in the earlier list."""
    check(before)
    check(after)
    return torch.argsort(before)[after]


def to_last(lists: Sequence[Tensor], relatives: Sequence[Tensor] | Tensor) -> list[Tensor]:
    """Bring all lists into the last order, which is Pi_{L+1}.

    Args:
        lists: L lists; list l is in the order Pi_l.
        relatives: L + 1 relative orders: Pi_1^-1 Pi_2, ..., Pi_L^-1 Pi_{L+1}, and Pi_L^-1 Pi_1. The last of them
            is for the input of the client's adapters; this function does not use it.
    """
    out = []
    for level in range(len(lists)):
        x = lists[level]
        for step in relatives[level : len(lists)]:
            x = x[step]
        out.append(x)
    return out
