"""Parse overrides of an experiment's keys, such as ``--set method.rounds=5``. It imports no large library."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.errors import InputError


def parse_override(text: str) -> tuple[str, Any]:
    """``method.rounds=5`` -> ("method.rounds", 5); the value is TOML, or a bare word."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise InputError(f"--set {text}: expected key=value, e.g. --set method.rounds=5")
    try:
        found = tomllib.loads(f"v = {value}")
    except ValueError:  # not TOML, or too many digits
        return key.strip(), value.strip()
    except RecursionError:
        raise InputError(f"--set {key.strip()}: the value is nested too deeply") from None
    if len(found) > 1:
        raise InputError(f"--set {key.strip()}: the value has lines after its end; expected one value")
    return key.strip(), found["v"]


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """The values of several overrides, by key.

    Raises:
        InputError: as :func:`parse_override`, a key occurs twice, or a table replaces a key that was given before it.
    """
    found: dict[str, Any] = {}
    for key, value in map(parse_override, texts):
        if key in found:
            raise InputError(f"--set {key} is given twice: expected each key once")
        if inner := next((other for other in found if other.startswith(f"{key}.")), None):
            raise InputError(f"--set {key} would replace --set {inner}, which is given before it: give the table first")
        found[key] = value
    return found


def refuse_doubles(changes: Mapping[str, Any], options: Mapping[str, tuple[str, Any]]) -> None:
    """Refuse changes of a key that a command's own option sets, too: one of the two values would be lost.

    Args:
        changes: values by key, as :func:`parse_overrides` returns them.
        options: the option's name and value, by the key that it sets; an option without a value is None.

    Raises:
        InputError: a key has two values.

    Example:
        >>> refuse_doubles({"run.engine": "local"}, {"run.engine": ("--engine", None)})
    """
    for key, (option, value) in options.items():
        if value is None:
            continue
        for given, inner in changes.items():
            path = key.removeprefix(f"{given}.").split(".") if key.startswith(f"{given}.") else []
            while path and isinstance(inner, Mapping) and path[0] in inner:
                inner = inner[path.pop(0)]
            if key == given or (key.startswith(f"{given}.") and not path):
                raise InputError(f"{option} {value} and --set {given} both set {key}: give one of the two", key=key)
