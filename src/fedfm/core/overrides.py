"""Parse overrides of an experiment's keys, such as ``--set method.rounds=5``. It imports no large library."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
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
        InputError: as :func:`parse_override`, or a key occurs twice.
    """
    found: dict[str, Any] = {}
    for key, value in map(parse_override, texts):
        if key in found:
            raise InputError(f"--set {key} is given twice: expected each key once")
        found[key] = value
    return found
