"""Registry of methods, attacks, aggregations and optimisers by name. The name of a class is the name of its file.

A name in an experiment never makes Python import anything but fedfm. The owner of the process must first admit a class
from elsewhere (``module:Class`` or an installed entry point).
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

from fedfm.config.user_code import admit_function, is_function
from fedfm.errors import InputError, close, quote_names

_BASES = {
    "methods": "fedfm.core.method:Method",
    "attacks": "fedfm.attacks.attack:Attack",
    "aggregation": "fedfm.aggregation.base:Aggregator",
}
_HELD = {"optimisers": "fedfm.training:BY_NAME"}  # kinds whose classes are listed in a dict, not in a folder
_TABLES = {"method": "methods", "attack": "attacks", "aggregation": "aggregation"}  # for each table, its kind
_admitted: dict[tuple[str, str], type] = {}  # classes by (kind, name)
_WINGS = {  # for each kind, further places of its modules outside fedfm.<kind>: a module, or a package of modules
    "methods": ("fedfm.encrypted.blindfed",),
    "audits": ("fedfm.encrypted.audits",),
}
_NOT_NAMED = {"attacks": ("attack", "attackers"), "aggregation": ("base", "private")}  # files to leave out


def available(kind: str) -> dict[str, str]:
    """The names of a kind, e.g. "methods", each with its module or entry point: fedfm's own names come first."""
    if kind in _HELD:
        return {name: place.partition(":")[0] for name, place in _attribute(_HELD[kind]).items()}
    found: dict[str, str] = {}
    for place in (f"fedfm.{kind}", *_WINGS.get(kind, ())):
        found |= _modules_in(place, _NOT_NAMED.get(kind, ()))
    return dict(sorted(found.items())) | {point.name: point.value for point in _points(kind)}


def _modules_in(place: str, without: Sequence[str]) -> dict[str, str]:
    """The module of each name in a folder (or of a single file); the search imports nothing but fedfm itself."""
    root, *parts = place.split(".")
    folder = files(root).joinpath(*parts)
    if not folder.is_dir():
        return {parts[-1]: place}
    found = {}
    for entry in folder.iterdir():
        name = entry.name.removesuffix(".py")
        if name.startswith("_") or name in without:
            continue
        if entry.name.endswith(".py"):
            found[name] = f"{place}.{name}"
        elif entry.joinpath(f"{name}.py").is_file():  # an algorithm in its own folder
            found[name] = f"{place}.{name}.{name}"
    return found


def _points(kind: str) -> Sequence[Any]:
    """Installed entry points of this kind."""
    if not _any_installed(tuple(sys.path)):
        return ()
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return tuple(entry_points(group=f"fedfm.{kind}"))


@functools.lru_cache(maxsize=4)
def _any_installed(folders: tuple[str, ...]) -> bool:
    """Whether a folder of sys.path may contain an entry point of fedfm; true for archives and unreadable folders."""
    for folder in map(Path, folders):
        try:
            found = (b"[fedfm." in path.read_bytes() for path in folder.glob("*.*-info/entry_points.txt"))
            if folder.is_file() or any(found):
                return True
        except OSError:
            return True
    return False


def ours(kind: str) -> list[str]:
    """Names that come with fedfm."""
    return [name for name, where in available(kind).items() if ":" not in where]


def resolve(kind: str, name: Any, where: str = "") -> Any:
    """Return the class of a name: for ``fedavg`` the one in fedfm/methods/fedavg.py, for other code the admitted class.

    Args:
        where: the key, for the message; by default the kind's, e.g. "method.name".

    Raises:
        InputError: the name is unknown (a similar name is suggested), or it names code that was not admitted.
    """
    where = where or f"{kind.removesuffix('s')}.name"
    names = available(kind)
    if not isinstance(name, str):
        raise InputError(
            f"{where} = {json.dumps(name, default=str)}: expected {quote_names(names)}",
            key=where,
            allowed=quote_names(names),
        )
    if (kind, name) in _admitted:
        return _admitted[kind, name]
    if ":" in names.get(name, name):  # an entry point, or module:Class
        raise InputError(f'{where} = "{name}": code from outside fedfm, which nobody here has admitted', key=where)
    if name not in names:
        from fedfm.config.paper_names import how_to_set

        raise InputError(
            f'{where} = "{name}": expected {quote_names(names)}{how_to_set(name) or close(name, names)}',
            key=where,
            allowed=quote_names(names),
        )
    if kind in _HELD:
        return _attribute(_attribute(_HELD[kind])[name])
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
    """Import ``package.module:Class``, or the class of an installed entry point, so that experiments may name it.

    Importing runs the module: call this function only for names that this process's owner wrote.

    Args:
        where: the key or file, for the message.

    Raises:
        InputError: the class cannot be imported, or is not of this kind.
    """
    base = _attribute(_BASES[kind])
    try:
        points = [point for point in _points(kind) if point.name == name]
        cls = points[0].load() if points else _attribute(name)
    except Exception as error:  # the import runs the module's own code, which may raise any error
        from fedfm.core.error_places import of_import

        raise InputError(f'{where} = "{name}": {of_import(error)}', key=where) from None
    if not (isinstance(cls, type) and issubclass(cls, base) and is_dataclass(cls)):
        raise InputError(f'{where} = "{name}": expected a dataclass derived from {base.__name__}', key=where)
    from fedfm.config.user_classes import lacks

    if why := lacks(cls):
        raise InputError(f'{where} = "{name}": {why}', key=where)
    _admitted[kind, name] = cls


def admit_any(name: str, where: str) -> str:
    """Admit a method or an aggregation; returns its kind.

    Raises:
        InputError: as :func:`admit`.
    """
    try:
        of_aggregations = any(point.name == name for point in _points("aggregation"))
        other = of_aggregations or (":" in name and issubclass(_attribute(name), _attribute(_BASES["aggregation"])))
    except Exception:  # the module's own code may raise any error, and the name may be no class: admit says it
        other = False
    kind = "aggregation" if other else "methods"
    admit(kind, name, where)
    return kind


def admit_named(experiment: Mapping[str, Any]) -> None:
    """Admit every class that an experiment names; only for an experiment that this process's owner wrote.

    Raises:
        InputError: as :func:`admit`.
    """
    for table, kind in _TABLES.items():
        points = {point.name for point in _points(kind)}
        for where, name in _names(experiment.get(table), table):
            if ":" in name or name in points:
                admit(kind, name, where)
    for table in ("data", "model"):
        section = experiment.get(table)
        if isinstance(section, Mapping) and is_function(section.get("name")):
            admit_function(section["name"], f"{table}.name")


def _names(table: Any, where: str) -> Iterator[tuple[str, str]]:
    """(key, name) of a table and of its inner tables: a method may contain another one, e.g. FedBaF's base."""
    if isinstance(table, Mapping):
        for key, value in table.items():
            if key == "name" and isinstance(value, str):
                yield f"{where}.name", value
            else:
                yield from _names(value, f"{where}.{key}")


def name_of(kind: str, value: Any) -> str:
    """The name by which :func:`resolve` finds the class of ``value``."""
    if kind in _HELD:
        own = f"{type(value).__module__}:{type(value).__qualname__}"
        return next((name for name, place in _attribute(_HELD[kind]).items() if place == own), "")
    module = type(value).__module__
    name = module.rpartition(".")[2]
    return name if available(kind).get(name) == module else f"{module}:{type(value).__qualname__}"


def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
