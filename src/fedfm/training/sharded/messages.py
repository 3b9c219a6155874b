"""Messages between a client's process and the ranks of its group, in fedfm's wire format. No pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor

from fedfm.core.client import Terms
from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.core.wire import payload
from fedfm.errors import InputError
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training.optimisers import SGD, Adam, AdamW, Local, Proximal

_OPTIMISERS: Mapping[str, type[Local]] = {kind.__name__: kind for kind in (SGD, Adam, AdamW, Proximal)}
_HEAD = 8  # bytes of the length of the head


def encode(value: Mapping[str, Any]) -> bytes:
    """A message as bytes: the length of the head, the head, the data."""
    head, pieces = payload.encode(value)
    text = head.encode()
    return b"".join((len(text).to_bytes(_HEAD, "big"), text, *pieces))


def decode(message: bytes) -> dict[str, Any]:
    """The value of a message that :func:`encode` made."""
    size = int.from_bytes(message[:_HEAD], "big")
    head = message[_HEAD : _HEAD + size].decode()
    found: dict[str, Any] = payload.decode(head, memoryview(message)[_HEAD + size :], None, trusted=True)
    return found


def of_rows(rows: Rows) -> dict[str, Any]:
    """Rows as a message's value; deferred rows are computed."""
    rows = rows.compute()
    return {
        "tensors": rows.tensors,
        "tokens": None if rows.tokens is None else _of_tokens(rows.tokens),
        "labels": rows.labels,
        "pad": rows.pad,
        "pairs": None if rows.pairs is None else json.dumps(rows.pairs),
        "token_arguments": {name: _of_tokens(of) for name, of in rows.token_arguments.items()},
    }


def rows_of(value: Mapping[str, Any]) -> Rows:
    """The rows of :func:`of_rows`."""
    return Rows(
        tensors=dict(value["tensors"]),
        tokens=None if value["tokens"] is None else _tokens_of(value["tokens"]),
        labels=value["labels"],
        pad=value["pad"],
        pairs=None if value["pairs"] is None else _tuples(json.loads(value["pairs"])),
        token_arguments={name: _tokens_of(of) for name, of in value["token_arguments"].items()},
    )


def _of_tokens(tokens: Tokens) -> dict[str, Tensor]:
    return {"flat": tokens.concatenate().int(), "length": torch.from_numpy(tokens.length)}


def _tokens_of(value: Mapping[str, Tensor]) -> Tokens:
    return Tokens.one_after_the_other(value["flat"].numpy(), value["length"].numpy())


def of_local(local: Local) -> str:
    """A client optimiser as text.

    Raises:
        InputError: it is not one of fedfm's optimisers, or it trains two models.
    """
    name = type(local).__name__
    if _OPTIMISERS.get(name) is not type(local):
        raise InputError(
            f"run.processes_per_client: the client optimiser {name} trains in one process; expected "
            f"{', '.join(known.lower() for known in _OPTIMISERS)}",
            key="run.processes_per_client",
        )
    return json.dumps([name, asdict(local)])


def local_of(text: str) -> Local:
    """The client optimiser of :func:`of_local`."""
    name, values = json.loads(text)
    return _OPTIMISERS[name](**_tuples(values))


def of_terms(terms: Terms) -> dict[str, Any]:
    """A method's additions to local training as a message's value."""
    return {"mu": terms.mu, "correction": terms.correction, "only": None if terms.only is None else list(terms.only)}


def terms_of(value: Mapping[str, Any]) -> Terms:
    """The additions of :func:`of_terms`."""
    return Terms(value["mu"], value["correction"], None if value["only"] is None else tuple(value["only"]))


def of_spec(spec: ModelSpec) -> str:
    """A [model] table as text."""
    return json.dumps(asdict(spec))


def spec_of(text: str) -> ModelSpec:
    """The [model] table of :func:`of_spec`."""
    values = _tuples(json.loads(text))
    adaptation = values["adaptation"]
    if adaptation is not None:
        known = {f.name for f in fields(AdaptationSpec)}
        adaptation = AdaptationSpec(**{key: value for key, value in adaptation.items() if key in known})
    return replace(ModelSpec(**values | {"adaptation": None}), adaptation=adaptation)


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples, at every depth."""
    if isinstance(value, list):
        return tuple(_tuples(entry) for entry in value)
    return {key: _tuples(entry) for key, entry in value.items()} if isinstance(value, dict) else value
