"""Texts of a student that computes on encrypted rows: every row has T places, a power of two, and secret length.

A row of n tokens fills its T places with its own tokens again and again: place p has token p mod n, with the position
of that token. So every argument of a polynomial is one of a real token. A mask says which places are real; as keys, the
others count nothing. The model in the clear computes on the same places, so that both give the same states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedfm.encrypted.token_places import places_of
from fedfm.errors import InputError
from fedfm.models.adapters.side_texts import PLACES, base_of, text_places
from fedfm.models.quiet import quiet

POST_NORM = ("bert",)  # model types of texts whose blocks are attention, sum, norm, MLP, sum, norm
LEAST = 4  # smallest number of places
_ARGUMENTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def with_places(module: Any, max_length: int) -> nn.Module:
    """Make a new module with the weights of a BERT, and with positions for T tokens only.

    T is the power of two from ``max_length`` on, or the largest one for which the model has positions.

    Raises:
        InputError: the model has another type, or is too short.
    """
    config = module.config
    if config.model_type not in POST_NORM:
        raise InputError(f"model.name: a model of type {config.model_type!r} reads texts; expected a BERT")
    positions = int(config.max_position_embeddings)
    places = places_of(min(max_length, positions))
    places = places if places <= positions else places // 2
    if places < LEAST:
        raise InputError(f"model.max_length = {max_length}: expected at least {LEAST} tokens", key="model.max_length")
    known = {key: value for key, value in config.to_dict().items() if key not in ("architectures", "dtype")}
    with quiet(), torch.random.fork_rng(devices=[]):
        made: Any = type(module)(type(config)(**known | {"max_position_embeddings": places, PLACES: places}))
    state = dict(module.state_dict())
    for name in state:
        if name.endswith("position_embeddings.weight"):
            state[name] = state[name][:places]
    made.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return made.eval()  # type: ignore[no-any-return]


def place_index(lengths: Tensor, places: int) -> Tensor:
    """Return which token (n, T) is at each place of rows with these lengths (n,)."""
    return torch.arange(places, device=lengths.device) % lengths[:, None]


def real_places(lengths: Tensor, places: int) -> Tensor:
    """Return the mask (n, T) of the places that are not copies."""
    return torch.arange(places, device=lengths.device) < lengths[:, None]


def fill_places(module: nn.Module) -> None:
    """Let a student of texts fill all places of its rows, before its embedding; a second call changes nothing."""
    base, places = base_of(module), text_places(module)
    if not places or hasattr(base, PLACES):
        return
    setattr(base, PLACES, places)

    def fill(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(zip(_ARGUMENTS, args, strict=False)) | named
        ids, mask = given["input_ids"], given.get("attention_mask")
        tokens = torch.full((len(ids),), ids.shape[1], device=ids.device) if mask is None else mask.sum(1)
        lengths = tokens.clamp(1, places)
        index = place_index(lengths, places)
        for name in ("input_ids", "token_type_ids"):
            if given.get(name) is not None:
                given[name] = given[name].gather(1, index)
        given |= {"position_ids": index, "attention_mask": real_places(lengths, places).long()}
        return (), given

    base.register_forward_pre_hook(fill, with_kwargs=True)


def embedding_tables(module: Any) -> dict[str, Tensor]:
    """Return what a client needs to embed its tokens: ``word`` (V, d), and ``position`` (T, d) with the token type.

    The scale and the shift of the embedding's norm are in the first block, so the client needs neither.
    """
    embedding = base_of(module).embeddings
    positions = embedding.position_embeddings.weight + embedding.token_type_embeddings.weight[0]
    return {"word": embedding.word_embeddings.weight.detach().cpu(), "position": positions.detach().cpu()}


def embed(ids: Tensor, lengths: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Embed token ids (n, up to T) of these lengths (n,): (n, T, d + 1), normalised; the last feature is the mask."""
    places = len(tables["position"])
    index = place_index(lengths, places)
    x = (tables["word"][ids.gather(1, index)] + tables["position"][index]).double()
    x = x - x.mean(-1, keepdim=True)
    x = x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
    return torch.cat([x, real_places(lengths, places).double()[..., None]], -1)
