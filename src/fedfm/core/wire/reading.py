"""Parse a message's head, by the grammar in ``payload``, into decoders that know each value's position in the data.

A head is parsed once and used many times, because the clients of a cohort send the same head.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import reprlib
import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedfm.core.wire.dtypes import DTYPES
from fedfm.core.wire.limits import MAX_ARRAYS, MAX_NODES, MAX_TENSORS, count_keys
from fedfm.errors import E_DTYPE, E_FORMAT, E_SIZE, E_TENSORS, ClientFault
from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Params, layout_of, layout_sent

_SMALL = 1 << 16  # longest head that is cached
_MANY = 8  # from this count on, numbers of one type, or texts, are read together
_FLOAT, _INT = struct.Struct("<d"), struct.Struct("<q")


Read = Callable[[Any], Any]  # decodes a message's data: a memoryview, or an array that the tensors then share


def _compile(head: str, trusted: bool) -> tuple[Read, int]:
    keys = None if trusted else count_keys(head)
    try:
        tree = _parse(head)
    except (ValueError, RecursionError) as error:
        raise ClientFault(E_FORMAT, f"the head is not JSON: {str(error)[:80]}") from None
    plan = _Plan(trusted)
    read = plan.node(tree)
    if keys not in (None, plan.keys):
        raise ClientFault(E_FORMAT, "a key occurs twice in the head")
    return read, plan.at


def _parse(head: str) -> Any:
    """Parse a head without garbage collection, which would double the time; the tree has no cycles."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return json.loads(head, parse_float=_no_fraction)
    finally:
        if collecting:
            gc.enable()


def _no_fraction(text: str) -> NoReturn:
    """Refuse a fraction: a head has only whole numbers, and parsing 65,536 fractions would take 0.1 s."""
    raise ValueError(f"the number {text[:20]} is not whole")


_known = functools.lru_cache(maxsize=32)(_compile)


def reader(head: str, trusted: bool) -> tuple[Read, int]:
    """The decoder for the values of a head, and the number of bytes of these values.

    Args:
        trusted: whether this program wrote the head; then the number of values is not limited.

    Raises:
        ClientFault: the head is malformed, or has too many values.
    """
    return (_known if len(head) <= _SMALL else _compile)(head, trusted)


class _Plan:
    """Positions of a head's values in the data, and the numbers of keys and values."""

    def __init__(self, trusted: bool) -> None:
        self.at = self.keys = self.nodes = self.arrays = 0
        self._trusted = trusted

    def take(self, count: int) -> int:
        self.at += count
        return self.at - count

    def node(self, node: Any) -> Read:
        self.nodes += 1
        if self.nodes > MAX_NODES and not self._trusted:
            raise ClientFault(E_SIZE, f"a message with more than {MAX_NODES} separate values")
        if node is None or node is True or node is False:
            return lambda data: node
        if node == "f" or node == "i":
            at, number = self.take(8), _FLOAT if node == "f" else _INT
            return lambda data: number.unpack_from(data, at)[0]
        if isinstance(node, list):
            if (alike := self.alike(node)) is not None:
                return lambda data: list(alike(data))
            items = [self.node(item) for item in node]
            return lambda data: [item(data) for item in items]
        if isinstance(node, dict) and len(node) == 1:
            self.keys += 1
            ((tag, body),) = node.items()
            if tag == "s" and isinstance(body, str):
                return lambda data: body
            if tag == "m" and isinstance(body, dict):
                return self.mapping(body)
            self.array()
            if tag == "t" and isinstance(body, list) and len(body) == 2:
                dtype, shape = _dtype(body[0]), _shape(body[1])
                flat = self.tensor(dtype, math.prod(shape))
                return lambda data: flat(data).view(shape)
            if tag == "p" and isinstance(body, list):
                return self.params(body)
        raise ClientFault(E_FORMAT, f"unknown node {_short(node)}")

    def array(self) -> None:
        self.arrays += 1
        if self.arrays > MAX_ARRAYS and not self._trusted:
            raise ClientFault(E_SIZE, f"a message of more than {MAX_ARRAYS} tensors and parameters")

    def mapping(self, body: dict[str, Any]) -> Read:
        self.keys += len(body)
        if (alike := self.alike(list(body.values()))) is not None:
            names = list(body)
            return lambda data: dict(zip(names, alike(data), strict=True))
        fields = [(key, self.node(item)) for key, item in body.items()]
        return lambda data: {key: field(data) for key, field in fields}

    def alike(self, nodes: list[Any]) -> Callable[[Any], Sequence[Any]] | None:
        """A decoder for many numbers of one type, or many texts; None if there are few or they are mixed."""
        count = len(nodes)
        if count < _MANY:
            return None
        for code in "if":
            if nodes.count(code) == count:
                start, numbers = self.take(8 * count), struct.Struct(f"<{count}{'q' if code == 'i' else 'd'}")
                return lambda data: numbers.unpack_from(data, start)
        if not all(type(node) is dict and len(node) == 1 and type(node.get("s")) is str for node in nodes):
            return None
        self.keys += count
        texts = [node["s"] for node in nodes]
        return lambda data: texts

    def tensor(self, dtype: torch.dtype, count: int) -> Read:
        start = self.take(count * dtype.itemsize)
        return lambda data: _tensor(data[start : start + count * dtype.itemsize], dtype, count)

    def params(self, body: list[Any]) -> Read:
        if len(body) > MAX_TENSORS and not self._trusted:
            raise ClientFault(E_SIZE, f"parameters of {len(body)} tensors: expected at most {MAX_TENSORS}")
        if not all(isinstance(e, list) and len(e) == 3 and isinstance(e[0], str) for e in body):
            raise ClientFault(E_FORMAT, "a parameter entry is not [name, dtype, shape]")
        if len({e[0] for e in body}) != len(body):
            raise ClientFault(E_TENSORS, "a parameter name occurs twice")
        entries = tuple((name, _dtype(dtype), _shape(shape)) for name, dtype, shape in body)
        layout = (layout_of if self._trusted else layout_sent)(entries)
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
        raise ClientFault(E_DTYPE, f"dtype {_short(name)} cannot be sent")
    return DTYPES[name]


def _shape(shape: Any) -> tuple[int, ...]:
    count = 1  # a size of 0 counts as 1: torch refuses large sizes even if another size is 0
    if isinstance(shape, list) and len(shape) <= 16:
        for n in shape:
            if type(n) is not int or not 0 <= n < 1 << 40:
                break
            count *= n or 1
        else:
            if count < 1 << 62:
                return tuple(shape)
    raise ClientFault(E_FORMAT, f"{_short(shape)} is not the shape of a tensor")


def _short(node: Any) -> str:
    """A short text for another party's value, without formatting all of it."""
    return reprlib.repr(node)[:60]
