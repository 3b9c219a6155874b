"""LoRA ranks of the clients, which an experiment lists in the order of their names."""

from __future__ import annotations

from collections.abc import Sequence

from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.text import listing
from fedfm.errors import InputError

_NAMED = 6  # largest number of clients that a notice names


def client_ranks(ranks: Sequence[int], fed: Federation) -> dict[ClientId, int]:
    """Return each client's rank r_k; a list that is shorter than the clients is repeated.

    At the start a notice says who has which rank, because a client that is absent moves the ranks of those after it.

    Raises:
        InputError: a rank exceeds that of the model's adapter.
    """
    most = fed.model.adaptation_spec.rank
    if max(ranks) > most:
        raise InputError(
            f"method.ranks = {list(ranks)}: {max(ranks)} is above model.adaptation.rank = {most}, the largest "
            "rank of the model; raise model.adaptation.rank, and set alpha",
            key="method.ranks",
        )
    found = {c: ranks[i % len(ranks)] for i, c in enumerate(fed.clients)}
    if not fed.round and len({*ranks}) > 1:
        unused = len(ranks) - len(found)
        more = f"; the last {unused} of {len(ranks)} ranks belong to no client" if unused > 0 else ""
        text = f"method.ranks by client: {listing([f'{c} {r}' for c, r in found.items()], _NAMED)}{more}"
        fed.notice(text)
    return found
