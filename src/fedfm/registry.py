"""Registry: the file's name is the name. What is there, and the class behind a name."""

from __future__ import annotations

from dataclasses import is_dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

from fedfm.errors import InputError, close, listed


def available(kind: str) -> dict[str, str]:
    """Name -> where it comes from, of everything of a kind ("methods"): our folder, then installed entry points."""
    found = {
        entry.name.removesuffix(".py"): f"fedfm.{kind}.{entry.name.removesuffix('.py')}"
        for entry in files(f"fedfm.{kind}").iterdir()
        if entry.name.endswith(".py") and not entry.name.startswith("_")
    }
    return dict(sorted(found.items())) | {point.name: point.value for point in entry_points(group=f"fedfm.{kind}")}


def resolve(kind: str, name: str) -> Any:
    """``fedavg`` -> the class in fedfm/methods/fedavg.py; ``my_package.module:Class`` -> that; else an entry point.

    Raises:
        InputError: nothing has that name; close ones are suggested.
    """
    from fedfm.method import Method

    if ":" in name:
        module_name, _, attribute = name.partition(":")
        try:
            found_class = getattr(import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise InputError(f'{kind.removesuffix("s")}.name = "{name}": {error}') from None
        if not (isinstance(found_class, type) and issubclass(found_class, Method) and is_dataclass(found_class)):
            raise InputError(f'{kind.removesuffix("s")}.name = "{name}": expected a dataclass derived from Method')
        return found_class
    names = available(kind)
    if name not in names:
        raise InputError(f'{kind.removesuffix("s")}.name = "{name}": expected {listed(names)}{close(name, names)}')
    for point in entry_points(group=f"fedfm.{kind}", name=name):
        return point.load()
    module = import_module(names[name])
    found = [
        c
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Method) and c.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise InputError(f"{names[name]} defines {len(found)} methods, expected one")
    return found[0]
