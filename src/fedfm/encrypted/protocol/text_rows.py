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
from fedfm.errors import E_FIELD, ClientFault, InputError
from fedfm.models.adapters.side_adapter import SideModel

if TYPE_CHECKING:
    from fedfm.core.client import Client
    from fedfm.encrypted.protocol.handshake import Hello

_NONE = -1  # in a message of token ids, what follows a row's last token
_NAMED = 5  # number of rows that a message names


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
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(hello.tokenizer)
    tokenizer.no_padding()
    tokenizer.enable_truncation(hello.tokens)
    found = tokenizer.encode_batch(texts)
    ids = torch.full((len(texts), hello.tokens), _NONE, dtype=torch.int64)
    for row, one in zip(ids, found, strict=True):
        row[: len(one.ids)] = torch.tensor(one.ids, dtype=torch.int64)
    ids[:, 0] = ids[:, 0].clamp_min(0)  # a row without any token has the first one of the vocabulary
    cut = [i for i, one in enumerate(found) if one.overflowing]
    return ids, (ids != _NONE).sum(1), cut


def name_cut_rows(client: Client, parts: dict[str, Rows], hello: Hello) -> None:
    """Write one line about rows that are longer than the server's model reads, before anything is encrypted."""
    names, total = [], 0
    for part, rows in parts.items():
        total += len(rows)
        names += [f"{part} row {i + 1}" for i in token_ids(texts_of(rows), hello)[2]] if len(rows) else []
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        client.log(
            f"{len(names)} of {total} rows are longer than the server's model reads, and are cut to {hello.tokens} "
            f"tokens: {', '.join(names[:_NAMED])}{more}"
        )


def embed_ids(ids: Tensor, lengths: Tensor, tables: dict[str, Tensor]) -> Tensor:
    """Return what is encrypted of rows: (n, T, d + 1), the embedded tokens and the mask.

    Raises:
        ClientFault: the tokenizer has tokens that the table has not.
    """
    if int(ids.max()) >= len(tables["word"]):
        raise ClientFault(E_FIELD, "the server's tokenizer has tokens that its table of embeddings has not")
    return embed(ids.clamp_min(0), lengths, tables)
