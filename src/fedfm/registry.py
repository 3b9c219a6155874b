"""Registry: the file's name is the name. What is there, and the class behind a name."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedfm.errors import InputError, close, listed

_BASES = {
    "methods": "fedfm.method:Method",
    "attacks": "fedfm.attacks.attack:Attack",
    "aggregation": "fedfm.federation:Aggregator",
}
_IS_ATTACK = re.compile(r"^class \w+\(Attack\):$", re.M)  # fedfm.attacks holds other modules, too


def available(kind: str) -> dict[str, str]:
    """Name -> where it comes from, of everything of a kind ("methods"): our folder, then installed entry points."""
    found = {
        entry.name.removesuffix(".py"): f"fedfm.{kind}.{entry.name.removesuffix('.py')}"
        for entry in files(f"fedfm.{kind}").iterdir()
        if entry.name.endswith(".py")
        and not entry.name.startswith("_")
        and (kind != "attacks" or _IS_ATTACK.search(entry.read_text(encoding="utf-8")))
    }
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


def resolve(kind: str, name: str) -> Any:
    """``fedavg`` -> the class in fedfm/methods/fedavg.py; ``my_package.module:Class`` -> that; else an entry point.

    Raises:
        InputError: nothing has that name; close ones are suggested.
    """
    where, base = f"{kind.removesuffix('s')}.name", _attribute(_BASES[kind])
    if ":" in name:
        try:
            found_class = _attribute(name)
        except (ImportError, AttributeError) as error:
            raise InputError(f'{where} = "{name}": {error}') from None
        if not (isinstance(found_class, type) and issubclass(found_class, base) and is_dataclass(found_class)):
            raise InputError(f'{where} = "{name}": expected a dataclass derived from {base.__name__}')
        return found_class
    names = available(kind)
    if name not in names:
        raise InputError(f'{where} = "{name}": expected {listed(names)}{close(name, names)}')
    for point in _points(kind):
        if point.name == name:
            return point.load()
    module = import_module(names[name])
    found = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, base) and c.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise InputError(f"{names[name]} defines {len(found)} {kind}, expected one")
    return found[0]


def name_of(kind: str, value: Any) -> str:
    """The name by which :func:`resolve` finds the class of ``value``."""
    module, cls = type(value).__module__, type(value)
    ours = module.removeprefix(f"fedfm.{kind}.")
    return ours if ours != module else f"{module}:{cls.__qualname__}"


def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
