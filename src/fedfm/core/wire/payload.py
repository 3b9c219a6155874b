"""Wire format: dataclasses, Params, tensors and scalars <-> a JSON head and one packed block of bytes. No pickle.

A payload has two parts: ``head``, a compact JSON text with structure, names, dtypes and shapes, and ``data``, the raw
little-endian bytes of all numbers in the order of the head. One block per message is faster: Flower moves two objects
per tensor, and 448 small tensors take 14 times as long as the same bytes in one piece.

Integers and floats take eight bytes each in ``data``, so the size of a message follows from its structure alone.

Head grammar: ``"f"`` float64, ``"i"`` int64 (both in data); ``{"s": text}``, ``true``, ``false``, ``null``;
``{"t": [dtype, shape]}`` tensor; ``{"p": [[name, dtype, shape], ...]}`` Params; ``{"m": {key: node}}`` mapping or
dataclass; ``[node, ...]`` list or tuple.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.checks import conform
from fedfm.core.wire.limits import sized
from fedfm.core.wire.reading import DTYPES, reader
from fedfm.errors import E_FORMAT, ClientFault
from fedfm.linalg.params import Layout, Params, to_bytes

_FLOAT, _INT = struct.Struct("<d"), struct.Struct("<q")

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Pieces = list[memoryview | bytes]
Encoder = Callable[[Any, Pieces], str]  # of a value: appends its data, returns its head


# --- encoding --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def quoted(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text)


def encode(value: Any) -> tuple[str, Pieces]:
    """The head, and the pieces of the data in order (views if possible: join or write them before they change).

    Raises:
        TypeError: the value holds a type that cannot travel.
    """
    pieces: Pieces = []
    try:
        return _encode(value, pieces), pieces
    except RecursionError:
        raise TypeError("a value that is nested too deep, or in itself, cannot travel") from None


def size(value: Any) -> tuple[int, int]:
    """Lengths of the head and the data that :func:`encode` returns; views of tensors are not copied.

    Raises:
        TypeError: the value holds a type that cannot travel.
    """
    head, pieces = encode(value)
    return len(head), sum(map(len, pieces))


def _encode(value: Any, pieces: Pieces) -> str:
    return _encoder(type(value))(value, pieces)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=512)
def _encoder(kind: type) -> Encoder:
    """The encoder for a type, cached: to find it for each value would cost more than to encode."""
    for kinds, encoder in _KINDS:
        if issubclass(kind, kinds):
            return encoder
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} cannot travel: use Params, tensors, numbers, text, lists, dicts, dataclasses")
    names = tuple(f.name for f in dataclasses.fields(kind))
    return lambda value, pieces: _encode_mapping({name: getattr(value, name) for name in names}, pieces)


def _encode_params(value: Params, pieces: Pieces) -> str:
    pieces.extend(to_bytes(value.flats[dtype]) for dtype in value.layout.sizes)
    return f'{{"p":{_entries(value.layout)}}}'


def _encode_int(value: int, pieces: Pieces) -> str:
    if not -(1 << 63) <= value < 1 << 63:
        raise TypeError("a whole number of more than eight bytes cannot travel")
    pieces.append(_INT.pack(value))
    return '"i"'


def _encode_float(value: float, pieces: Pieces) -> str:
    pieces.append(_FLOAT.pack(value))
    return '"f"'


def _encode_tensor(value: Tensor, pieces: Pieces) -> str:
    if value.layout is not torch.strided or value.is_meta or value.dtype not in _NAMES:
        kind = "meta" if value.is_meta else str(value.dtype if value.layout is torch.strided else value.layout)
        raise TypeError(
            f"a tensor of {kind.removeprefix('torch.')} cannot travel: use dense ones of {', '.join(DTYPES)}"
        )
    pieces.append(to_bytes(value.detach().cpu().contiguous()))
    return f'{{"t":["{_NAMES[value.dtype]}",{_compact(list(value.shape))}]}}'


def _encode_array(value: np.ndarray, pieces: Pieces) -> str:
    if value.dtype.name not in DTYPES:
        raise TypeError(f"an array of {value.dtype.name} cannot travel: use {', '.join(DTYPES)}")
    return _encode_tensor(torch.from_numpy(np.ascontiguousarray(value)), pieces)


def _encode_mapping(value: Mapping[str, Any], pieces: Pieces) -> str:
    return f'{{"m":{{{",".join([f"{_key(k)}:{_encode(v, pieces)}" for k, v in value.items()])}}}}}'


def _encode_list(value: Sequence[Any], pieces: Pieces) -> str:
    return f"[{','.join([_encode(v, pieces) for v in value])}]"


_KINDS: tuple[tuple[type | tuple[type, ...], Encoder], ...] = (
    (type(None), lambda value, pieces: "null"),
    (bool, lambda value, pieces: "true" if value else "false"),
    (int, _encode_int),
    (float, _encode_float),
    (str, lambda value, pieces: f'{{"s":{quoted(value)}}}'),
    (Params, _encode_params),
    (Tensor, _encode_tensor),
    (np.ndarray, _encode_array),
    (np.generic, lambda value, pieces: _encode(value.item(), pieces)),
    (Mapping, _encode_mapping),
    ((list, tuple), _encode_list),
)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a mapping that travels has text keys, not {type(key).__name__}")
    return quoted(key)


def _compact(tree: Any) -> str:
    return json.dumps(tree, separators=(",", ":"))


@functools.lru_cache(maxsize=512)
def _entries(layout: Layout) -> str:
    return _compact([[name, _NAMES[dtype], list(shape)] for name, dtype, shape in layout.entries])


# --- decoding --------------------------------------------------------------------------------------------------------


def decode(head: str, data: bytes | memoryview | np.ndarray, hint: Any = Any, *, trusted: bool = False) -> Any:
    """Rebuild a value and check it against ``hint``; with None a later :func:`conform` checks it.

    Args:
        data: copied, unless it is an array (n,) of uint8: tensors are then views of it.
        trusted: written by this program, so that the limits of :mod:`fedfm.core.wire.limits` do not apply.

    Raises:
        ClientFault: the payload is malformed, too large, or does not fit ``hint``; no other error occurs.
    """
    if not trusted:
        sized(head, len(data))
    read, length = reader(head, trusted)
    if length != len(data):
        raise ClientFault(E_FORMAT, f"the data end after {len(data)} bytes, {length} are announced")
    value = read(data if isinstance(data, np.ndarray) else memoryview(data))
    return value if hint is None else conform(value, hint)
