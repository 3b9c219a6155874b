"""Wire format: dataclasses, Params, tensors and scalars <-> a JSON head and one packed block of bytes. No pickle.

A payload becomes two things: ``head``, a compact JSON text that holds structure, names, dtypes and shapes, and
``data``, the raw little-endian bytes of every number in the order in which the head mentions it. One block a message
matters: Flower moves two objects a tensor, and 448 small tensors take 14 times as long as the same bytes in one piece.

Integers and floats travel in ``data`` as eight bytes each, so the size of a message follows from its structure alone:
:func:`size` computes it without serialising.

Head grammar: ``"f"`` float64, ``"i"`` int64 (both in data); ``{"s": text}``, ``true``, ``false``, ``null``;
``{"t": [dtype, shape]}`` tensor; ``{"p": [[name, dtype, shape], ...]}`` Params; ``{"m": {key: node}}`` mapping or
dataclass; ``[node, ...]`` list or tuple.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm import buffers
from fedfm.conform import conform
from fedfm.errors import (
    E_DTYPE,
    E_FORMAT,
    E_SIZE,
    E_TENSORS,
    ClientFault,
)
from fedfm.params import Layout, Params, layout_of, to_bytes

MAX_BYTES = 4 << 30  # of one payload's data; more is refused before anything is allocated
MAX_HEAD = 64 << 20
MAX_DEPTH = 32
_SMALL = 1 << 16  # a head up to this length is remembered
_FLOAT, _INT = struct.Struct("<d"), struct.Struct("<q")

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


Pieces = list[memoryview | bytes]
Encoder = Callable[[Any, Pieces], str]  # of a value: appends its data, returns its head
Sizer = Callable[[Any], tuple[int, int]]  # lengths of both


# --- encoding --------------------------------------------------------------------------------------------------------


def encode(value: Any) -> tuple[str, Pieces]:
    """The head, and the pieces of the data in order (views where possible: join or write them before they change).

    Raises:
        TypeError: something in it cannot travel.
    """
    pieces: Pieces = []
    try:
        return _encoder(type(value))(value, pieces), pieces  # type: ignore[arg-type]
    except RecursionError:
        raise _too_deep() from None


@functools.lru_cache(maxsize=512)
def _encoder(kind: type) -> Encoder:
    """What encodes values of one type: found once, since asking each value what it is costs more than the rest."""
    if kind is type(None):
        return lambda value, pieces: "null"
    for kinds, encoder, _ in _KINDS:
        if issubclass(kind, kinds):
            return encoder
    if not dataclasses.is_dataclass(kind):
        raise _cannot_travel(kind)
    names = [(name, f"{quoted(name)}:") for name in _fields(kind)]

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
    return _mapping([f"{quoted(_key(k))}:{_encode(v, pieces)}" for k, v in value.items()])


def _encode_list(value: Sequence[Any], pieces: Pieces) -> str:
    return f"[{','.join([_encode(v, pieces) for v in value])}]"


def _cannot_travel(kind: type) -> TypeError:
    return TypeError(f"{kind.__name__} cannot travel: use Params, tensors, numbers, text, lists, dicts, dataclasses")


def _too_deep() -> TypeError:
    return TypeError("what is nested as deep as this, or in itself, cannot travel")


def _eight_bytes(value: int) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise TypeError("a whole number of more than eight bytes cannot travel")
    return value


def _tensor_name(value: Tensor) -> str:
    if value.layout is not torch.strided or value.is_meta or value.dtype not in _NAMES:
        kind = "meta" if value.is_meta else str(value.dtype if value.layout is torch.strided else value.layout)
        raise TypeError(
            f"a tensor of {kind.removeprefix('torch.')} cannot travel: use dense ones of {', '.join(DTYPES)}"
        )
    return _NAMES[value.dtype]


def _array_name(value: np.ndarray) -> str:
    if value.dtype.name not in DTYPES:
        raise TypeError(f"an array of {value.dtype.name} cannot travel: use {', '.join(DTYPES)}")
    return value.dtype.name


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a mapping that travels has text keys, not {type(key).__name__}")
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
def quoted(text: str) -> str:
    """A text as JSON has it."""
    return json.dumps(text)


def size(value: Any) -> tuple[int, int]:
    """(length of the head, length of the data) that :func:`encode` would give, from structure and shapes alone.

    Raises:
        TypeError: something in it cannot travel.
    """
    try:
        return _sizer(type(value))(value)  # type: ignore[arg-type]
    except RecursionError:
        raise _too_deep() from None


@functools.lru_cache(maxsize=512)
def _sizer(kind: type) -> Sizer:
    """What sizes values of one type."""
    if kind is type(None):
        return lambda value: (4, 0)
    for kinds, _, sizer in _KINDS:
        if issubclass(kind, kinds):
            return sizer
    if dataclasses.is_dataclass(kind):
        names = _fields(kind)
        frame = 8 + sum(len(quoted(name)) + 1 for name in names) + max(len(names) - 1, 0)

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
        head, data, count = head + len(quoted(_key(k))) + 1 + h, data + d, count + 1
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
    (str, lambda value, pieces: f'{{"s":{quoted(value)}}}', lambda value: (6 + len(quoted(value)), 0)),
    (Params, _encode_params, lambda value: (6 + len(_entries(value.layout)), value.layout.nbytes)),
    (Tensor, _encode_tensor, lambda value: _size_of_array(_tensor_name(value), value)),
    (np.ndarray, _encode_array, lambda value: _size_of_array(_array_name(value), value)),
    (np.generic, lambda value, pieces: _encode(value.item(), pieces), lambda value: size(value.item())),
    (Mapping, _encode_mapping, lambda value: _size_of_items(value.items())),
    ((list, tuple), _encode_list, _size_of_list),
)


# --- decoding --------------------------------------------------------------------------------------------------------


def decode(head: str, data: bytes | memoryview | np.ndarray, hint: Any = Any, *, trusted: bool = False) -> Any:
    """Rebuild a value and check it against ``hint``; None leaves it unchecked, for a later :func:`conform`.

    Args:
        data: copied, but for an array (n,) of uint8: of that the tensors are views.
        trusted: of our own making, and as large as it likes.

    Raises:
        ClientFault: the payload is malformed, too large, or not what ``hint`` says; never any other error.
    """
    if not trusted and (len(head) > MAX_HEAD or len(data) > MAX_BYTES):
        raise ClientFault(E_SIZE, f"a message of {len(head) + len(data)} bytes is over the limit")
    read, length = (_known if len(head) <= _SMALL else _compiled)(head)
    if length != len(data):
        raise ClientFault(E_FORMAT, f"the data end after {len(data)} bytes, {length} are announced")
    value = read(data if isinstance(data, np.ndarray) else memoryview(data))
    return value if hint is None else conform(value, hint)


Read = Callable[[Any], Any]  # from the data of a message: a memoryview, or an array of which tensors are views


def _compiled(head: str) -> tuple[Read, int]:
    """What reads the values that a head describes, and how many bytes of data they take."""
    try:
        tree = json.loads(head)
    except (ValueError, RecursionError) as error:
        raise ClientFault(E_FORMAT, f"the head is not JSON: {str(error)[:80]}") from None
    plan = _Plan()
    return plan.node(tree, 0), plan.at


# Clients of one cohort send the same head: its text is understood once.
_known = functools.lru_cache(maxsize=32)(_compiled)


class _Plan:
    """Where in the data each value of a head begins."""

    def __init__(self) -> None:
        self.at = 0

    def take(self, count: int) -> int:
        self.at += count
        return self.at - count

    def node(self, node: Any, depth: int) -> Read:
        if depth > MAX_DEPTH:
            raise ClientFault(E_FORMAT, f"nested deeper than {MAX_DEPTH}")
        if node is None or node is True or node is False:
            return lambda data: node
        if node == "f" or node == "i":
            at, number = self.take(8), _FLOAT if node == "f" else _INT
            return lambda data: number.unpack_from(data, at)[0]
        if isinstance(node, list):
            items = [self.node(item, depth + 1) for item in node]
            return lambda data: [item(data) for item in items]
        if isinstance(node, dict) and len(node) == 1:
            ((tag, body),) = node.items()
            if tag == "s" and isinstance(body, str):
                return lambda data: body
            if tag == "m" and isinstance(body, dict):
                fields = [(key, self.node(item, depth + 1)) for key, item in body.items()]
                return lambda data: {key: field(data) for key, field in fields}
            if tag == "t" and isinstance(body, list) and len(body) == 2:
                dtype, shape = _dtype(body[0]), _shape(body[1])
                flat = self.tensor(dtype, math.prod(shape))
                return lambda data: flat(data).view(shape)
            if tag == "p" and isinstance(body, list):
                return self.params(body)
        raise ClientFault(E_FORMAT, f"unknown node {str(node)[:60]}")

    def tensor(self, dtype: torch.dtype, count: int) -> Read:
        start = self.take(count * dtype.itemsize)
        return lambda data: _tensor(data[start : start + count * dtype.itemsize], dtype, count)

    def params(self, body: list[Any]) -> Read:
        if not all(isinstance(e, list) and len(e) == 3 and isinstance(e[0], str) for e in body):
            raise ClientFault(E_FORMAT, "a parameter entry is not [name, dtype, shape]")
        if len({e[0] for e in body}) != len(body):
            raise ClientFault(E_TENSORS, "a parameter name occurs twice")
        layout = layout_of(tuple((name, _dtype(dtype), _shape(shape)) for name, dtype, shape in body))
        flats = [(dtype, self.tensor(dtype, n)) for dtype, n in layout.sizes.items()]
        return lambda data: Params.from_flat(layout, {dtype: flat(data) for dtype, flat in flats})


def _tensor(data: memoryview | np.ndarray, dtype: torch.dtype, count: int) -> Tensor:
    raw = np.frombuffer(data, dtype=np.uint8)
    if dtype is torch.bool and raw.size and raw.max(initial=0) > 1:
        raise ClientFault(E_FORMAT, "a bool is neither 0 nor 1")
    if isinstance(data, np.ndarray) and np.little_endian and raw.ctypes.data % dtype.itemsize == 0:
        return torch.from_numpy(raw).view(dtype)
    out = buffers.empty(count, dtype)
    if not np.little_endian:
        raw = raw.reshape(-1, dtype.itemsize)[:, ::-1].reshape(-1)
    out.view(torch.uint8).numpy()[:] = raw
    return out


def _dtype(name: Any) -> torch.dtype:
    if not isinstance(name, str) or name not in DTYPES:
        raise ClientFault(E_DTYPE, f"dtype {str(name)[:40]!r} does not travel")
    return DTYPES[name]


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape) or len(shape) > 16:
        raise ClientFault(E_FORMAT, f"{str(shape)[:60]} is not a shape")
    if math.prod(max(n, 1) for n in shape) >= 1 << 62:  # with a 0 beside them, they are no entries, and yet no tensor
        raise ClientFault(E_FORMAT, f"{str(shape)[:60]} is not the shape of a tensor")
    return tuple(shape)
