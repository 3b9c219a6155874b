"""The hello and its answer, which begin BlindFed's encrypted forward pass, and the division of rows into batches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fedfm.encrypted.token_places import places_of
from fedfm.errors import E_FIELD, ClientFault

PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Hello:
    """The server's message to a client before the forward pass.

    Attributes:
        session: name of this run in the client's store, hexadecimal.
        blocks, positions, width: the sizes L, P and d of the disclosed activations.
        rank: r of the side adapters.
        classes: class names in the order of the logits.
        kernels: kind of compute kernels in local training (see ``run.kernels``).
        batch: number of rows per batch.
        tokens, patch, extra: number T of tokens of a row; (height, width) of a patch; number of tokens before patches.
        picture: settings that turn images into the model's input (:func:`fedfm.models.image_settings.settings_of`).
        digest: SHA-256 of the model.
        key: the server's public key, if rows are encrypted.
        ring: degree of the ciphertexts' ring, if rows are encrypted.
        release, scales: the map (P, T) from a block's tokens to the inputs of the adapters, and the divisors (L,) of
            the block outputs; only in the permuted protocol.
        limits: largest statistics of a picture that the client may encrypt, by name
            (:mod:`~fedfm.encrypted.student.input_limits`); empty if the student has none.
        tokenizer, tables: for texts, the model's tokenizer and its tables of embeddings, by which the client embeds
            its rows (:mod:`~fedfm.encrypted.protocol.text_rows`); ``patch`` and ``picture`` are empty then.
    """

    session: str
    blocks: int
    positions: int
    width: int
    rank: int
    classes: list[str]
    kernels: str
    batch: int
    tokens: int
    patch: list[int]
    extra: int
    picture: dict[str, Any]
    digest: str
    key: Tensor | None = None
    ring: int = 8192
    release: Tensor | None = None
    scales: Tensor | None = None
    limits: dict[str, float] = field(default_factory=dict)
    tokenizer: str = ""
    tables: dict[str, Tensor] = field(default_factory=dict)


def check_numbers(hello: Hello) -> None:
    """Check the sizes in a server's hello, on which the client's loops and memory depend.

    Raises:
        ClientFault: a size is not positive, or a batch does not fit into a ciphertext.
    """
    for name in ("blocks", "positions", "width", "rank", "batch", "tokens"):
        if (size := getattr(hello, name)) < 1:
            raise ClientFault(E_FIELD, f"the server's {name} = {size}: expected at least 1")
    if hello.key is not None and hello.batch * places_of(hello.tokens) > hello.ring // 2:
        raise ClientFault(
            E_FIELD,
            f"the server asks for {hello.batch} rows of {hello.tokens} tokens at a time; a ciphertext of its ring has "
            f"{hello.ring // 2} places",
        )


@dataclass(frozen=True)
class Opened:
    """A client's answer to the hello.

    Attributes:
        rows: the client's number of rows in each of :data:`PARTS`.
        key: the client's public key, if rows are encrypted.
        keys: a message with the client's evaluation keys, if rows are encrypted.
    """

    rows: dict[str, int]
    key: Tensor | None = None
    keys: Tensor | None = None


@dataclass(frozen=True)
class RowSpan:
    """One batch: the rows from ``start`` to ``stop`` of one part, or of all parts together if ``part`` is empty."""

    start: int
    stop: int
    part: str = ""


def spans(rows: Mapping[str, int], batch: int) -> list[RowSpan]:
    """Divide a client's rows into batches; the parts follow one another, so a batch may have rows of two parts."""
    total = sum(rows[part] for part in PARTS)
    return [RowSpan(start, min(start + batch, total)) for start in range(0, total, batch)]


def spans_by_part(rows: Mapping[str, int], batch: int) -> list[RowSpan]:
    """Divide a client's rows into batches of at least two rows, each from one part.

    The order of a single row would hide nothing.

    Raises:
        ClientFault: a part has only one row.
    """
    found = []
    for part in PARTS:
        n = rows[part]
        if n == 1:
            raise ClientFault(E_FIELD, f"1 {part} row: a batch in a secret order needs at least 2")
        count = -(-n // batch)
        ends = [round(n * i / count) for i in range(count + 1)] if count else [0]
        found += [RowSpan(a, b, part) for a, b in itertools.pairwise(ends)]
    return found
