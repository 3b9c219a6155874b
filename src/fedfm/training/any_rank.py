"""Local training of LoRA with a rank that differs from the model's."""

from __future__ import annotations

from fedfm.core.client import Client
from fedfm.linalg.params import Params
from fedfm.models.adapters.lora import (
    alpha_of,
    cut,
    factors,
    merge,
    pad_rank,
    rank_of,
    rest,
    scale_for_rank,
    shift_weights,
)
from fedfm.training.optimisers import Local


def fit(local: Local, client: Client, w: Params) -> Params:
    """Train LoRA parameters ``w`` with the scale alpha / r; their rank r is at most that of the model's adapters."""
    if w.layout is client.model.layout or (rank := rank_of(w)) is None:
        return local(client, w)
    with scale_for_rank(client.model, rank):
        return cut(local(client, pad_rank(w, client.model.layout)), w.layout)


def go_on(local: Local, client: Client, w: Params, fresh: Params) -> Params:
    """Local training from ``w``.

    If the adapters in ``w`` and ``fresh`` have different ranks, the adapter in ``w`` is frozen. A second adapter, which
    starts as ``fresh``, is trained in addition. Both are returned as one adapter.
    """
    if rank_of(w) in (None, rank_of(fresh)):
        return local(client, w)
    alpha = alpha_of(client.model)
    shift = factors(w, alpha)
    with shift_weights(client.model, shift):
        return merge(local(client, fresh.replace(w.only(rest(w)))), shift, alpha)
