"""Convert dataclasses, Params, tensors and scalars to a JSON head and a block of bytes, and back. No pickle.

A payload has two parts: ``head``, a compact JSON text with structure, names, dtypes and shapes, and ``data``, the raw
little-endian bytes of all numbers in the order of the head. One block per message is faster: otherwise Flower would
move two objects per tensor, and 448 small tensors take 14 times as long as the same bytes in one piece.

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
from fedfm.core.wire.dtypes import DTYPES
from fedfm.errors import E_FORMAT, ClientFault
from fedfm.linalg.params import Layout, Params, to_bytes

_FLOAT, _INT = struct.Struct("<d"), struct.Struct("<q")

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


Pieces = list[memoryview | bytes]
Parts = list[Tensor | np.ndarray | bytes]  # the data in order, before tensors and arrays become bytes
Encoder = Callable[[Any, Parts], str]  # (value, parts) -> head; appends the value's data to the parts


# --- encoding --------------------------------------------------------------------------------------------------------


def encode(value: Any) -> tuple[str, Pieces]:
    """(head, pieces of the data in order); pieces may be views of the value, so use them before the value changes.

    Raises:
        TypeError: the value holds a type that cannot be sent.
    """
    head, parts = _head_and_parts(value)
    return head, [part if isinstance(part, bytes) else _bytes_of(part) for part in parts]


def size(value: Any) -> tuple[int, int]:
    """Lengths of the head and the data that :func:`encode` would return. Tensors stay on their devices.

    Raises:
        TypeError: the value holds a type that cannot be sent.
    """
    head, parts = _head_and_parts(value)
    return len(head), sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)


def _head_and_parts(value: Any) -> tuple[str, Parts]:
    parts: Parts = []
    try:
        return _encode(value, parts), parts
    except RecursionError:
        raise TypeError("a value that is nested too deep, or that contains itself, cannot be sent") from None


def _bytes_of(part: Tensor | np.ndarray) -> memoryview:
    tensor = part if isinstance(part, Tensor) else torch.from_numpy(part)
    return to_bytes(tensor.detach().cpu().contiguous())


@functools.lru_cache(maxsize=512)
def _encoder(kind: type) -> Encoder:
    """The encoder for a type, cached, since a search for each value would cost more than the encoding."""
    if kind is type(None):
        return lambda value, parts: "null"
    for kinds, encoder in _KINDS:
        if issubclass(kind, kinds):
            return encoder
    if not dataclasses.is_dataclass(kind):
        raise _cannot_travel(kind)
    names = [(name, f"{quote(name)}:") for name in _fields(kind)]

    def of_fields(value: Any, parts: Parts) -> str:
        fields = [(label, getattr(value, name)) for name, label in names]
        return _mapping([label + _encoder(type(field))(field, parts) for label, field in fields])  # type: ignore[arg-type]

    return of_fields


def _mapping(items: Sequence[str]) -> str:
    return f'{{"m":{{{",".join(items)}}}}}'


def _encode(value: Any, parts: Parts) -> str:
    return _encoder(type(value))(value, parts)  # type: ignore[arg-type]


def _encode_params(value: Params, parts: Parts) -> str:
    parts.extend(value.flats[dtype] for dtype in value.layout.sizes)
    return f'{{"p":{_entries(value.layout)}}}'


def _encode_int(value: int, parts: Parts) -> str:
    parts.append(_INT.pack(_eight_bytes(value)))
    return '"i"'


def _encode_float(value: float, parts: Parts) -> str:
    parts.append(_FLOAT.pack(value))
    return '"f"'


def _encode_tensor(value: Tensor, parts: Parts) -> str:
    return _announce(_tensor_name(value), value, parts)


def _encode_array(value: np.ndarray, parts: Parts) -> str:
    return _announce(_array_name(value), np.ascontiguousarray(value), parts)


def _announce(dtype: str, value: Tensor | np.ndarray, parts: Parts) -> str:
    parts.append(value)
    return f'{{"t":["{dtype}",{_compact(list(value.shape))}]}}'


def _encode_mapping(value: Mapping[str, Any], parts: Parts) -> str:
    return _mapping([f"{quote(_key(k))}:{_encode(v, parts)}" for k, v in value.items()])


def _encode_list(value: Sequence[Any], parts: Parts) -> str:
    return f"[{','.join([_encode(v, parts) for v in value])}]"


def _cannot_travel(kind: type) -> TypeError:
    return TypeError(f"{kind.__name__} cannot be sent: use Params, tensors, numbers, text, lists, dicts, dataclasses")


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


_KINDS: tuple[tuple[type | tuple[type, ...], Encoder], ...] = (
    (bool, lambda value, parts: "true" if value else "false"),
    (int, _encode_int),
    (float, _encode_float),
    (str, lambda value, parts: f'{{"s":{quote(value)}}}'),
    (Params, _encode_params),
    (Tensor, _encode_tensor),
    (np.ndarray, _encode_array),
    (np.generic, lambda value, parts: _encode(value.item(), parts)),
    (Mapping, _encode_mapping),
    ((list, tuple), _encode_list),
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
        data: bytes, which are copied, or an array (n,) of uint8; the value's tensors are views of this array.
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
