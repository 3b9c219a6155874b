"""The weight of a client in a mean of changes."""

from __future__ import annotations

from fedfm.core.client import Client
from fedfm.errors import InputError

WEIGHTINGS = ("size", "uniform", "tokens")
WORDS = "size (n_k), uniform, or tokens: the number that a language model's loss counts, e.g. those of answers"


def weight_of(client: Client, weighting: str) -> int:
    """Client half: n_k, 1, or the number of tokens that the loss of the client's rows counts.

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
