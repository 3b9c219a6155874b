"""The weight of a client's update in a mean."""

from __future__ import annotations

from fedfm.core.client import Client
from fedfm.errors import InputError

WEIGHTINGS = ("size", "uniform", "tokens")
WORDS = "size (n_k), uniform, or tokens: the number of tokens that enter a language model's loss"


def weight_of(client: Client, weighting: str) -> int:
    """Client half: n_k (the number of rows), or 1, or the number of tokens that enter the loss.

    Raises:
        InputError: the rows have no tokens to count.
    """
    if weighting == "size":
        return len(client.data.train)
    if weighting == "uniform":
        return 1
    from fedfm.models.language.next_token import targets_of

    count = targets_of(client.model, client.data.train)
    if count is None:
        raise InputError(
            'method.weighting = "tokens": the rows have no tokens to predict; expected "size" or "uniform"',
            key="method.weighting",
        )
    return count
