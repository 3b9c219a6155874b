"""Checks of payloads: values against annotations, parameters against the expected layout."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from fedfm.errors import E_DTYPE, E_FIELD, E_NONFINITE, E_NORM, E_SHAPE, E_TENSORS, ClientFault
from fedfm.linalg.params import Layout, Params, squared_norm


def conform(value: Any, hint: Any, path: str = "reply", most: float = math.inf) -> Any:
    """Check ``value`` against ``hint``, and convert mappings to the dataclasses that ``hint`` names.

    The same checks apply to a value passed by reference and to a decoded one. Floats and floating-point tensors must be
    finite.

    Args:
        most: the largest L2 norm of parameters and of any floating-point tensor; it must be below 1e19, or infinity.

    Raises:
        ClientFault: a field does not fit; the message has the path of the first such field.
    """
    return _checker(hint, most)(value, path)


Check = Callable[[Any, str], Any]


@functools.lru_cache(maxsize=1024)
def _checker(hint: Any, most: float) -> Check:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return functools.partial(_any, most=most)
    if hint is Params:
        return functools.partial(_params, most=most)
    if hint is Tensor or hint is np.ndarray:
        return functools.partial(_tensor if hint is Tensor else _array, most=most)
    if hint in (None, types.NoneType):
        return _exactly(types.NoneType)
    if hint is float:
        return _float
    if hint in (int, str, bool):
        return _exactly(hint)
    if origin in (typing.Union, types.UnionType):
        return _union([_checker(a, most) for a in args])
    if origin in (list, tuple):
        return _sequence(origin, args, most)
    if origin in (dict, Mapping) or hint is dict:
        return _mapping(args[1] if args else Any, most)
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, most)
    raise TypeError(f"a handler's annotation {hint!r} cannot be checked")


_MANY = 8  # from this number of values on, one check of all values is faster
_SCALARS = (int, float, str, bool)


def _alike(values: Collection[Any], *kinds: Any) -> bool:
    """Whether all values have the same type, one of ``kinds`` (by default any scalar type), and are finite."""
    found = set(map(type, values))
    if len(found) != 1 or not found <= set(kinds or _SCALARS):
        return False
    return float not in found or all(map(math.isfinite, values))


def _fail(path: str, expected: str, value: Any) -> ClientFault:
    return ClientFault(E_FIELD, f"{path}: expected {expected}, got {type(value).__name__}")


def _any(value: Any, path: str, most: float) -> Any:
    if isinstance(value, float):
        return _float(value, path)
    if isinstance(value, Params):
        return _params(value, path, most)
    if isinstance(value, Tensor):
        return _tensor(value, path, most)
    if isinstance(value, Mapping):
        if len(value) >= _MANY and _alike(value.values()):
            return dict(value)
        return {k: _any(v, f"{path}.{k}", most) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) >= _MANY and _alike(value):
            return list(value)
        return [_any(v, f"{path}[{i}]", most) for i, v in enumerate(value)]
    return value


def _params(value: Any, path: str, most: float) -> Params:
    if not isinstance(value, Params):
        raise _fail(path, "parameters", value)
    if not (value.is_finite() if most == math.inf else value.within(most)):
        bad = (n for n, t in value.items() if t.dtype.is_floating_point and not torch.isfinite(t).all())
        if (name := next(bad, None)) is not None:
            raise ClientFault(E_NONFINITE, f"{path}: {name} has NaN or infinity")
        raise _too_large(path, value.norm(), most)
    return value


def _tensor(value: Any, path: str, most: float) -> Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor):
        raise _fail(path, "a tensor", value)
    if not value.dtype.is_floating_point:
        return value
    if most < math.inf and squared_norm(value.detach().reshape(-1)) <= most * most:
        return value
    if not bool(torch.isfinite(value).all()):
        raise ClientFault(E_NONFINITE, f"{path} has NaN or infinity")
    if most < math.inf:
        raise _too_large(path, float(torch.linalg.vector_norm(value.detach().double())), most)
    return value


def _too_large(path: str, norm: float, most: float) -> ClientFault:
    return ClientFault(E_NORM, f"{path}: L2 norm {norm:.3g} is above {most:g}")


def _array(value: Any, path: str, most: float) -> np.ndarray:
    return _tensor(value, path, most).numpy()


def _float(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _fail(path, "a number", value)
    if not math.isfinite(value):
        raise ClientFault(E_NONFINITE, f"{path} is {value}")
    return float(value)


def _exactly(kind: type) -> Check:
    def check(value: Any, path: str) -> Any:
        if type(value) is not kind:
            raise _fail(path, kind.__name__, value)
        return value

    return check


def _union(checks: list[Check]) -> Check:
    def check(value: Any, path: str) -> Any:
        fault = None
        for option in checks:
            try:
                return option(value, path)
            except ClientFault as error:
                # A fault in a tensor is more specific than a wrong type.
                fault = error if fault is None or error.code != E_FIELD else fault
        raise fault or ClientFault(E_FIELD, path)

    return check


def _sequence(origin: type, args: tuple[Any, ...], most: float) -> Check:
    variadic = origin is list or (len(args) == 2 and args[1] is Ellipsis) or not args
    item = _checker(args[0] if args else Any, most)
    items = [] if variadic else [_checker(a, most) for a in args]

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _fail(path, "a list", value)
        if variadic:
            if len(value) >= _MANY and args[:1] and args[0] in _SCALARS and _alike(value, args[0]):
                return origin(value)
            return origin(item(v, f"{path}[{i}]") for i, v in enumerate(value))
        if len(value) != len(items):
            raise ClientFault(E_FIELD, f"{path}: expected {len(items)} items, got {len(value)}")
        return origin(c(v, f"{path}[{i}]") for i, (c, v) in enumerate(zip(items, value, strict=True)))

    return check


def _mapping(hint: Any, most: float) -> Check:
    item = _checker(hint, most)

    def check(value: Any, path: str) -> Any:
        if not isinstance(value, Mapping) or isinstance(value, Params):
            raise _fail(path, "a mapping", value)
        if len(value) >= _MANY and hint in _SCALARS and _alike(value.values(), hint):
            return dict(value)
        return {k: item(v, f"{path}.{k}") for k, v in value.items()}

    return check


def _dataclass(cls: Any, most: float) -> Check:
    fields = [f.name for f in dataclasses.fields(cls)]
    required = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    checks: dict[str, Check] = {}

    def check(value: Any, path: str) -> Any:
        if not checks:  # built on first use, since a module's annotations may refer to each other
            hints = get_type_hints(cls)
            checks.update({name: _checker(hints[name], most) for name in fields})
        if isinstance(value, cls):
            for name, c in checks.items():
                c(getattr(value, name), f"{path}.{name}")
            return value
        if not isinstance(value, Mapping) or isinstance(value, Params):
            raise _fail(path, cls.__name__, value)
        if unknown := [str(name) for name in value if name not in checks]:
            raise ClientFault(E_FIELD, f"{path}: {cls.__name__} has no field {min(unknown)!r}")
        if missing := [name for name in required if name not in value]:
            raise ClientFault(E_FIELD, f"{path}: {min(missing)!r} is missing")
        try:
            return cls(**{name: checks[name](v, f"{path}.{name}") for name, v in value.items()})
        except ClientFault:
            raise
        except (ValueError, TypeError) as error:
            raise ClientFault(E_FIELD, f"{path}: {error}") from None

    return check


def nonfinite(value: Any, path: str = "") -> str | None:
    """Path of the first NaN or infinity in a value that can be stored; None if all is finite."""
    match value:
        case Params():
            finite = value.is_finite()
        case Tensor():
            finite = not value.dtype.is_floating_point or bool(torch.isfinite(value).all())
        case np.ndarray() | np.floating():
            finite = value.dtype.kind != "f" or bool(np.isfinite(value).all())
        case float():
            finite = math.isfinite(value)
        case Mapping():
            return _first(nonfinite(v, f"{path}.{k}") for k, v in value.items())
        case list() | tuple():
            return _first(nonfinite(v, f"{path}[{i}]") for i, v in enumerate(value))
        case _ if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return _first(nonfinite(getattr(value, f.name), f"{path}.{f.name}") for f in fields)
        case _:
            return None
    return None if finite else path


def _first(paths: Iterable[str | None]) -> str | None:
    return next((path for path in paths if path is not None), None)


def match(value: Params, like: Layout, path: str = "reply") -> None:
    """Check that names, dtypes and shapes equal those of ``like``.

    Raises:
        ClientFault: E_TENSORS, E_DTYPE or E_SHAPE; the message has the first tensor that differs, and both versions.
    """
    if value.layout is like:
        return
    if missing := [n for n in like.slots if n not in value.layout.slots]:
        raise ClientFault(E_TENSORS, f"{path}: {missing[0]} is missing")
    if extra := [n for n in value.layout.slots if n not in like.slots]:
        raise ClientFault(E_TENSORS, f"{path}: {extra[0]} was not requested")
    for (name, dtype, shape), (got, got_dtype, got_shape) in zip(like.entries, value.layout.entries, strict=True):
        if name != got:
            raise ClientFault(E_TENSORS, f"{path}: {got} is in the place of {name}")
        if dtype != got_dtype:
            raise ClientFault(E_DTYPE, f"{path}: {name} is {_short(got_dtype)}, expected {_short(dtype)}")
        if shape != got_shape:
            raise ClientFault(E_SHAPE, f"{path}: {name} has shape {got_shape}, expected {shape}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
