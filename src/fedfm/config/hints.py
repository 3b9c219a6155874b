"""Improve the hints on unknown keys: a hint must not name a key that another table of the experiment rules out."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedfm.config.registry import resolve
from fedfm.errors import Faults, InputError

if TYPE_CHECKING:
    from fedfm.config.key_suggestions import UnknownKey


def refuse_hinted(error: InputError, tables: Mapping[str, Any]) -> None:
    """Raise the error again if the other tables give a better hint for it, or for an error that is shown with it.

    Raises:
        InputError: there is a better hint.
    """
    from fedfm.config.key_suggestions import UnknownKey
    from fedfm.config.more_faults import MOST

    if any(isinstance(fault, UnknownKey) for fault in error.all):
        faults = Faults()
        for i, fault in enumerate(error.all):
            shown = i < MOST
            faults.found.append(_with_hint(fault, tables) if shown and isinstance(fault, UnknownKey) else fault)
        faults.refuse()


def _with_hint(error: UnknownKey, tables: Mapping[str, Any]) -> InputError:
    """The error with a hint that fits the other tables."""
    from fedfm.config.known_keys import KnownKeys

    value: Any = tables
    for key in error.key.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    keys = KnownKeys(tables, value)
    found = error.among(keys)
    run = tables.get("run")
    if error.key.startswith("method.") and isinstance(run, Mapping) and run.get("asynchronous"):
        from fedfm.config.asynchronous import not_late

        with contextlib.suppress(InputError):  # an unknown name is refused before the keys of its table
            if why := not_late(resolve("methods", keys.method), keys.method):
                return InputError(f"{why}; and {found}", key="run.asynchronous")
    return found
