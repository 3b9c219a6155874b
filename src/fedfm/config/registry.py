"""Registry: the file's name is the name. What is there, and the class behind a name.

A name in an experiment never makes Python import anything but fedfm: a class of somebody else's, ``module:Class`` or an
installed entry point, has to be admitted first, by who owns the process.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedfm.errors import InputError, close, listed

_BASES = {
    "methods": "fedfm.core.method:Method",
    "attacks": "fedfm.attacks.attack:Attack",
    "aggregation": "fedfm.aggregation.base:Aggregator",
}
_HELD = {"optimisers": "fedfm.training:BY_NAME"}  # kinds without a file for each name: a dict of classes
_TABLES = {"method": "methods", "attack": "attacks", "aggregation": "aggregation"}  # of an experiment -> kind
_admitted: dict[tuple[str, str], type] = {}  # (kind, name) -> class
_BASES_ARE_IN = {"attacks": "attack", "aggregation": "base"}  # files that hold no named class


def available(kind: str) -> dict[str, str]:
    """Name -> where it comes from, of everything of a kind ("methods"): our folder, then installed entry points."""
    if kind in _HELD:
        return {name: cls.__module__ for name, cls in _attribute(_HELD[kind]).items()}
    found = {}
    for entry in files(f"fedfm.{kind}").iterdir():
        name = entry.name.removesuffix(".py")
        if name.startswith("_") or name == _BASES_ARE_IN.get(kind):
            continue
        if entry.name.endswith(".py"):
            found[name] = f"fedfm.{kind}.{name}"
        elif entry.joinpath(f"{name}.py").is_file():  # a folder, for an algorithm that owns numerics
            found[name] = f"fedfm.{kind}.{name}.{name}"
    return dict(sorted(found.items())) | {point.name: point.value for point in _points(kind)}


def _points(kind: str) -> Sequence[Any]:
    """Installed entry points of this kind."""
    if not _any_installed(tuple(sys.path)):
        return ()
    from importlib.metadata import entry_points  # which takes longer to load than to find out that there are none

    return tuple(entry_points(group=f"fedfm.{kind}"))


@functools.lru_cache(maxsize=4)
def _any_installed(folders: tuple[str, ...]) -> bool:
    return any(_mentions_us(Path(folder)) for folder in folders)


def _mentions_us(folder: Path) -> bool:
    if folder.is_file():  # an archive: not ours to read
        return True
    try:
        return any(b"[fedfm." in path.read_bytes() for path in folder.glob("*.*-info/entry_points.txt"))
    except OSError:
        return True


def ours(kind: str) -> list[str]:
    """Names of those that come with fedfm."""
    return [name for name, where in available(kind).items() if ":" not in where]


def resolve(kind: str, name: Any, where: str = "") -> Any:
    """``fedavg`` -> the class in fedfm/methods/fedavg.py; any other name -> the class that was admitted under it.

    Args:
        where: the key that names it, for the message ["method.name", by the kind].

    Raises:
        InputError: nothing has that name, and close ones are suggested; or it is code that nobody here has admitted.
    """
    where = where or f"{kind.removesuffix('s')}.name"
    names = available(kind)
    if not isinstance(name, str):
        raise InputError(f"{where} = {json.dumps(name, default=str)}: expected {listed(names)}")
    if (kind, name) in _admitted:
        return _admitted[kind, name]
    if ":" in names.get(name, name):  # an entry point's value, or a name that says where the class is
        raise InputError(f'{where} = "{name}": code beside fedfm\'s own, which nobody here has listed')
    if name not in names:
        raise InputError(f'{where} = "{name}": expected {listed(names)}{close(name, names)}')
    if kind in _HELD:
        return _attribute(_HELD[kind])[name]
    module, base = import_module(names[name]), _attribute(_BASES[kind])
    found = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, base) and c.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise InputError(f"{names[name]} defines {len(found)} {kind}, expected one")
    return found[0]


def admit(kind: str, name: str, where: str) -> None:
    """Import ``package.module:Class``, or what an installed entry point names, so that experiments may name it.

    Importing runs the module: only for names that this process's owner wrote.

    Args:
        where: the place that names it, for the message.

    Raises:
        InputError: it cannot be imported, or is no class of this kind.
    """
    base = _attribute(_BASES[kind])
    try:
        points = [point for point in _points(kind) if point.name == name]
        cls = points[0].load() if points else _attribute(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f'{where} = "{name}": {error}') from None
    if not (isinstance(cls, type) and issubclass(cls, base) and is_dataclass(cls)):
        raise InputError(f'{where} = "{name}": expected a dataclass derived from {base.__name__}')
    _admitted[kind, name] = cls


def admit_any(name: str, where: str) -> str:
    """Admit a class as what it is, a method or an aggregation; returns its kind.

    Raises:
        InputError: as :func:`admit`.
    """
    for kind in ("methods", "aggregation"):
        try:
            admit(kind, name, where)
            return kind
        except InputError as error:
            wrong = error
    raise wrong


def admit_named(experiment: Mapping[str, Any]) -> None:
    """Admit every class that an experiment's tables name: for an experiment that this process's owner wrote.

    Raises:
        InputError: as :func:`admit`.
    """
    for table, kind in _TABLES.items():
        points = {point.name for point in _points(kind)}
        for where, name in _names(experiment.get(table), table):
            if ":" in name or name in points:
                admit(kind, name, where)


def _names(table: Any, where: str) -> Iterator[tuple[str, str]]:
    """(key, name) of a table and of the tables in it: a method may hold another, as FedBaF's base."""
    if isinstance(table, Mapping):
        for key, value in table.items():
            if key == "name" and isinstance(value, str):
                yield f"{where}.name", value
            else:
                yield from _names(value, f"{where}.{key}")


def name_of(kind: str, value: Any) -> str:
    """The name by which :func:`resolve` finds the class of ``value``."""
    if kind in _HELD:
        return next((name for name, cls in _attribute(_HELD[kind]).items() if cls is type(value)), "")
    module = type(value).__module__
    name = module.rpartition(".")[2]
    return name if available(kind).get(name) == module else f"{module}:{type(value).__qualname__}"


def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
