"""Texts in BlindFed: what the server publishes so that a client can embed its own rows, and what the client sends.

The server sends its tokenizer and its tables of embeddings. A client encrypts the embedded tokens of its rows and the
mask of their places. All rows have T places, so the server learns neither the words nor the lengths. It does give away
the tables, which are weights; the blocks stay hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Rows
from fedfm.encrypted.student.text_places import embed, embedding_tables
from fedfm.errors import E_FIELD, ClientFault, InputError, first_line
from fedfm.models.adapters.side_adapter import SideModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fedfm.core.client import Client
    from fedfm.encrypted.protocol.handshake import Hello

_NONE = -1  # in a message of token ids, what follows a row's last token
_NAMED = 5  # number of rows that a message names
_BEYOND = "the server's tokenizer has tokens that its table of embeddings has not"
_UNKNOWN = 0.1  # a larger share of unknown tokens is named


# --- server ---------------------------------------------------------------------------------------------------------
def embedding_fields(model: SideModel) -> dict[str, Any]:
    """Return the fields of the hello by which clients embed their texts.

    Raises:
        InputError: the tokenizer has no description that other sites can read.
    """
    tokenizer = getattr(model.tools.tokenizer, "backend_tokenizer", None)
    if tokenizer is None:
        raise InputError(
            "a client without the model cannot read texts as a slow tokenizer does: expected tokenizer.json"
        )
    module = model.frozen_parts[0].module
    return {"tokenizer": tokenizer.to_str(), "tables": embedding_tables(module)}


def rows_of(x: Tensor) -> Rows:
    """Return the rows of a message in the clear: pixel values (n, 3, H, W), or token ids (n, T)."""
    if x.dim() == 4:
        return Rows({"pixel_values": x})
    return Rows({"input_ids": x.clamp_min(0), "attention_mask": (x != _NONE).long()})


# --- client ---------------------------------------------------------------------------------------------------------
def check_embedding(hello: Hello) -> None:
    """Check tokenizer and tables of a server's hello, before anything of them is stored or any row is read.

    Raises:
        ClientFault: the tokenizer cannot be read, or does not fit the tables; or the tables do not fit the places.
    """
    tokenizer, tables = tokenizer_of(hello), hello.tables
    if tables.keys() != {"word", "position"} or any(x.dim() != 2 for x in tables.values()):
        raise ClientFault(E_FIELD, "the server's tables of embeddings: expected word (V, d) and position (T, d)")
    word, position = tables["word"], tables["position"]
    if len(position) != hello.tokens:
        raise ClientFault(
            E_FIELD, f"the server asks for {hello.tokens} tokens a row, and its table has {len(position)} positions"
        )
    if word.shape[1] != position.shape[1] or not all(
        x.is_floating_point() and bool(x.isfinite().all()) for x in tables.values()
    ):
        raise ClientFault(E_FIELD, "the server's tables of embeddings: expected finite rows of the same width")
    added = tokenizer.encode("").ids
    if len(added) > hello.tokens:
        raise ClientFault(
            E_FIELD, f"the server's tokenizer adds {len(added)} tokens to a text, and a row has {hello.tokens} places"
        )
    if max([*tokenizer.get_vocab(with_added_tokens=True).values(), *added], default=0) >= len(word):
        raise ClientFault(E_FIELD, _BEYOND)


def tokenizer_of(hello: Hello) -> Tokenizer:
    """Return the server's tokenizer, which cuts rows to T tokens and pads none.

    Raises:
        ClientFault: it cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(hello.tokenizer)
    except Exception as error:  # the library raises no class of its own
        raise ClientFault(E_FIELD, f"the server's tokenizer cannot be read: {first_line(error)}") from None
    tokenizer.no_padding()
    tokenizer.enable_truncation(hello.tokens)
    return tokenizer


def texts_of(rows: Rows) -> list[str]:
    """Return the texts of rows that a client without a model keeps as bytes of UTF-8.

    Raises:
        ClientFault: the rows are not texts.
    """
    if rows.tokens is None:
        names = ", ".join(rows.tensors) or "images"
        raise ClientFault(E_FIELD, f"rows of {names}: the server's model takes texts")
    return [bytes(row.numpy().astype(np.uint8)).decode() for row in rows.tokens]


def token_ids(texts: list[str], hello: Hello) -> tuple[Tensor, Tensor, list[int]]:
    """Return ids (n, T) of the texts with the server's tokenizer, lengths (n,), and which rows were cut to T tokens."""
    found = tokenizer_of(hello).encode_batch(texts)
    ids = torch.full((len(texts), hello.tokens), _NONE, dtype=torch.int64)
    for row, one in zip(ids, found, strict=True):
        row[: len(one.ids)] = torch.tensor(one.ids, dtype=torch.int64)
    ids[:, 0] = ids[:, 0].clamp_min(0)  # a row without any token has the first one of the vocabulary
    cut = [i for i, one in enumerate(found) if one.overflowing]
    return ids, (ids != _NONE).sum(1), cut


def describe_rows(client: Client, parts: dict[str, Rows], hello: Hello) -> None:
    """Write a line each about rows that are cut and about unknown tokens, before anything is encrypted."""
    names, total, unknown, tokens = [], 0, 0, 0
    mark = _unknown_of(tokenizer_of(hello))
    for part, rows in parts.items():
        ids, lengths, cut = token_ids(texts_of(rows), hello)
        total, tokens = total + len(rows), tokens + int(lengths.sum())
        unknown += 0 if mark is None else int((ids == mark).sum())
        names += [f"{part} row {i + 1}" for i in cut]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        client.log(
            f"{len(names)} of {total} rows are longer than the server's model reads, and are cut to {hello.tokens} "
            f"tokens: {', '.join(names[:_NAMED])}{more}"
        )
    if unknown > _UNKNOWN * tokens:
        client.log(
            f"{unknown} of {tokens} tokens of the rows are unknown to the server's tokenizer, so the model does not "
            "tell them apart"
        )


def _unknown_of(tokenizer: Tokenizer) -> int | None:
    """Return the id that stands for words and letters which the tokenizer does not know, if it has one."""
    name = getattr(tokenizer.model, "unk_token", None)
    return None if name is None else tokenizer.token_to_id(name)


def embed_ids(ids: Tensor, lengths: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Return what is encrypted of rows: (n, T, d + 1), the embedded tokens and the mask.

    Raises:
        ClientFault: the tokenizer has tokens that the table has not.
    """
    if int(ids.max()) >= len(tables["word"]):
        raise ClientFault(E_FIELD, _BEYOND)
    return embed(ids.clamp_min(0), lengths, tables)
