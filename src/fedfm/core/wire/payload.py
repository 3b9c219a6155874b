"""Convert dataclasses, Params, tensors and scalars to a JSON head and a block of bytes, and back. No pickle.

A payload has two parts: ``head``, a compact JSON text with structure, names, dtypes and shapes, and ``data``, the raw
little-endian bytes of all numbers in the order of the head. One block per message is faster: otherwise Flower would
move two objects per tensor, and 448 small tensors take 14 times as long as the same bytes in one piece.

Integers and floats take eight bytes each in ``data``, so the size of a message follows from its structure alone;
:func:`size` computes it without serialising.

Head grammar: ``"f"`` float64, ``"i"`` int64 (both in data); ``{"s": text}``, ``true``, ``false``, ``null``;
``{"t": [dtype, shape]}`` tensor; ``{"p": [[name, dtype, shape], ...]}`` Params; ``{"m": {key: node}}`` mapping or
dataclass; ``[node, ...]`` list or tuple.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.checks import conform
from fedfm.core.wire.dtypes import DTYPES
from fedfm.errors import E_FORMAT, ClientFault
from fedfm.linalg.params import Layout, Params, to_bytes

_FLOAT, _INT = struct.Struct("<d"), struct.Struct("<q")

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


Pieces = list[memoryview | bytes]
Encoder = Callable[[Any, Pieces], str]  # (value, pieces) -> head; appends the value's data to the pieces
Sizer = Callable[[Any], tuple[int, int]]  # value -> lengths of its head and data


# --- encoding --------------------------------------------------------------------------------------------------------


def encode(value: Any) -> tuple[str, Pieces]:
    """(head, pieces of the data in order); pieces may be views of the value, so use them before the value changes.

    Raises:
        TypeError: the value holds a type that cannot be sent.
    """
    pieces: Pieces = []
    try:
        return _encoder(type(value))(value, pieces), pieces  # type: ignore[arg-type]
    except RecursionError:
        raise _too_deep() from None


@functools.lru_cache(maxsize=512)
def _encoder(kind: type) -> Encoder:
    """The encoder for a type, cached, since a search for each value would cost more than the encoding."""
    if kind is type(None):
        return lambda value, pieces: "null"
    for kinds, encoder, _ in _KINDS:
        if issubclass(kind, kinds):
            return encoder
    if not dataclasses.is_dataclass(kind):
        raise _cannot_travel(kind)
    names = [(name, f"{quote(name)}:") for name in _fields(kind)]

    def of_fields(value: Any, pieces: Pieces) -> str:
        fields = [(label, getattr(value, name)) for name, label in names]
        return _mapping([label + _encoder(type(field))(field, pieces) for label, field in fields])  # type: ignore[arg-type]

    return of_fields


def _mapping(items: Sequence[str]) -> str:
    return f'{{"m":{{{",".join(items)}}}}}'


def _encode(value: Any, pieces: Pieces) -> str:
    return _encoder(type(value))(value, pieces)  # type: ignore[arg-type]


def _encode_params(value: Params, pieces: Pieces) -> str:
    pieces.extend(to_bytes(value.flats[dtype]) for dtype in value.layout.sizes)
    return f'{{"p":{_entries(value.layout)}}}'


def _encode_int(value: int, pieces: Pieces) -> str:
    pieces.append(_INT.pack(_eight_bytes(value)))
    return '"i"'


def _encode_float(value: float, pieces: Pieces) -> str:
    pieces.append(_FLOAT.pack(value))
    return '"f"'


def _encode_tensor(value: Tensor, pieces: Pieces) -> str:
    name = _tensor_name(value)
    pieces.append(to_bytes(value.detach().cpu().contiguous()))
    return f'{{"t":["{name}",{_compact(list(value.shape))}]}}'


def _encode_array(value: np.ndarray, pieces: Pieces) -> str:
    _array_name(value)
    return _encode_tensor(torch.from_numpy(np.ascontiguousarray(value)), pieces)


def _encode_mapping(value: Mapping[str, Any], pieces: Pieces) -> str:
    return _mapping([f"{quote(_key(k))}:{_encode(v, pieces)}" for k, v in value.items()])


def _encode_list(value: Sequence[Any], pieces: Pieces) -> str:
    return f"[{','.join([_encode(v, pieces) for v in value])}]"


def _cannot_travel(kind: type) -> TypeError:
    return TypeError(f"{kind.__name__} cannot be sent: use Params, tensors, numbers, text, lists, dicts, dataclasses")


def _too_deep() -> TypeError:
    return TypeError("a value that is nested too deep, or that contains itself, cannot be sent")


def _eight_bytes(value: int) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise TypeError("a whole number of more than eight bytes cannot be sent")
    return value


def _tensor_name(value: Tensor) -> str:
    if value.layout is not torch.strided or value.is_meta or value.dtype not in _NAMES:
        kind = "meta" if value.is_meta else str(value.dtype if value.layout is torch.strided else value.layout)
        raise TypeError(
            f"a tensor of {kind.removeprefix('torch.')} cannot be sent: use dense ones of {', '.join(DTYPES)}"
        )
    return _NAMES[value.dtype]


def _array_name(value: np.ndarray) -> str:
    if value.dtype.name not in DTYPES:
        raise TypeError(f"an array of {value.dtype.name} cannot be sent: use {', '.join(DTYPES)}")
    return value.dtype.name


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a mapping that is sent must have text keys, not {type(key).__name__}")
    return key


def _compact(tree: Any) -> str:
    return json.dumps(tree, separators=(",", ":"))


@functools.lru_cache(maxsize=512)
def _entries(layout: Layout) -> str:
    return _compact([[name, _NAMES[dtype], list(shape)] for name, dtype, shape in layout.entries])


@functools.lru_cache(maxsize=512)
def _fields(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


@functools.lru_cache(maxsize=4096)
def quote(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text)


def size(value: Any) -> tuple[int, int]:
    """Lengths of the head and the data that :func:`encode` would return, from structure and shapes alone.

    Raises:
        TypeError: the value holds a type that cannot be sent.
    """
    try:
        return _sizer(type(value))(value)  # type: ignore[arg-type]
    except RecursionError:
        raise _too_deep() from None


@functools.lru_cache(maxsize=512)
def _sizer(kind: type) -> Sizer:
    if kind is type(None):
        return lambda value: (4, 0)
    for kinds, _, sizer in _KINDS:
        if issubclass(kind, kinds):
            return sizer
    if dataclasses.is_dataclass(kind):
        names = _fields(kind)
        frame = 8 + sum(len(quote(name)) + 1 for name in names) + max(len(names) - 1, 0)

        def of_fields(value: Any) -> tuple[int, int]:
            head, data = frame, 0
            for name in names:
                field = getattr(value, name)
                h, d = _sizer(type(field))(field)  # type: ignore[arg-type]
                head, data = head + h, data + d
            return head, data

        return of_fields
    raise _cannot_travel(kind)


def _size_of_int(value: int) -> tuple[int, int]:
    _eight_bytes(value)
    return 3, 8


def _size_of_items(items: Iterable[tuple[Any, Any]]) -> tuple[int, int]:
    head, data, count = 8, 0, 0
    for k, v in items:
        h, d = size(v)
        head, data, count = head + len(quote(_key(k))) + 1 + h, data + d, count + 1
    return head + max(count - 1, 0), data


def _size_of_list(value: Sequence[Any]) -> tuple[int, int]:
    sizes = [size(v) for v in value]
    return sum(h for h, _ in sizes) + 2 + max(len(sizes) - 1, 0), sum(d for _, d in sizes)


def _size_of_array(dtype: str, value: Any) -> tuple[int, int]:
    return 11 + len(dtype) + len(_compact(list(value.shape))), value.nbytes


_KINDS: tuple[tuple[type | tuple[type, ...], Encoder, Sizer], ...] = (
    (bool, lambda value, pieces: "true" if value else "false", lambda value: (4 if value else 5, 0)),
    (int, _encode_int, _size_of_int),
    (float, _encode_float, lambda value: (3, 8)),
    (str, lambda value, pieces: f'{{"s":{quote(value)}}}', lambda value: (6 + len(quote(value)), 0)),
    (Params, _encode_params, lambda value: (6 + len(_entries(value.layout)), value.layout.nbytes)),
    (Tensor, _encode_tensor, lambda value: _size_of_array(_tensor_name(value), value)),
    (np.ndarray, _encode_array, lambda value: _size_of_array(_array_name(value), value)),
    (np.generic, lambda value, pieces: _encode(value.item(), pieces), lambda value: size(value.item())),
    (Mapping, _encode_mapping, lambda value: _size_of_items(value.items())),
    ((list, tuple), _encode_list, _size_of_list),
)


# --- decoding --------------------------------------------------------------------------------------------------------


def decode(
    head: str,
    data: bytes | memoryview | np.ndarray,
    hint: Any = Any,
    *,
    trusted: bool = False,
    most: int | None = None,
) -> Any:
    """Rebuild a value and check it against ``hint``; if ``hint`` is None, the caller has to check the value.

    Args:
        data: bytes, which are copied, or an array (n,) of uint8, of which the value's tensors are views.
        trusted: whether this program wrote the payload; then the limits of :mod:`fedfm.core.wire.limits` do not apply.
        most: largest number of bytes of data, as in :func:`fedfm.core.wire.limits.check_size`.

    Raises:
        ClientFault: the payload is malformed, too large, or does not fit ``hint``; no other error occurs.
    """
    from fedfm.core.wire.reading import reader

    if not trusted:
        from fedfm.core.wire.limits import check_size

        check_size(head, len(data), most)
    read, length = reader(head, trusted)
    if length != len(data):
        raise ClientFault(E_FORMAT, f"the data end after {len(data)} bytes, but {length} are announced")
    value = read(data if isinstance(data, np.ndarray) else memoryview(data))
    return value if hint is None else conform(value, hint)
