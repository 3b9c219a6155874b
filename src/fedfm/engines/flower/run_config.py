"""Experiments as the configuration of a Flower app, with one key for each setting that is a single value.

``flwr run app --run-config 'method.rounds=4'`` changes a key that the app has. Settings without a default are not keys;
``set = "run.min_clients=3; run.patience=2"`` sets them. Lists and tables stay in the text ``experiment``. Server and
clients rebuild the same text. This module imports no large library, since a new process answers each message.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from fedfm.core.toml_text import check_depth, parse_override, put, to_toml
from fedfm.data.spec import WITHHELD
from fedfm.errors import InputError

EXPERIMENT, SET = "experiment", "set"
LONGEST = 1 << 20  # bytes of an experiment's text
_NAME = "name"  # the only setting outside tables


def split_settings(experiment: str, fixed: frozenset[str]) -> dict[str, Any]:
    """Split an experiment's text into the configuration of an app.

    Args:
        fixed: settings that stay in the text, so that they cannot be changed.
    """
    tables = tomllib.loads(experiment)
    single = {key: value for key, value in _single(tables, "") if key not in fixed}
    for key in single:
        *path, last = key.split(".")
        inner = tables
        for part in path:
            inner = inner[part]
        del inner[last]
    return {EXPERIMENT: to_toml(tables), SET: "", **single}


def _single(table: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if not key.replace("_", "a").isalnum():
            continue  # the key is a name that the user chose, e.g. a client's
        if isinstance(value, Mapping):
            yield from _single(value, f"{at}{key}.")
        elif isinstance(value, (bool, int, float, str)) and value != WITHHELD:
            yield f"{at}{key}", value


def _at(tables: Mapping[str, Any], key: str) -> Any:
    inner: Any = tables
    for part in key.split("."):
        inner = inner.get(part) if isinstance(inner, Mapping) else None
    return inner


def merge_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, with the complete experiment rebuilt as text.

    Raises:
        InputError: a setting is malformed, or the text is too long.
    """
    text = config.get(EXPERIMENT)
    single = {key: value for key, value in config.items() if "." in key or key == _NAME}
    more = str(config.get(SET) or "")
    if not isinstance(text, str) or not (single or more):
        return dict(config)
    size = len(text) + len(more) + sum(len(key) + len(str(value)) for key, value in single.items())
    if size > LONGEST:
        raise InputError(f"the run's configuration has no experiment of at most {LONGEST} bytes")
    for written in (text, *(f"{key} =" for key in single), more):
        check_depth(written)
    try:
        tables = tomllib.loads(text)
        changes = [parse_override(part) for part in more.split(";") if part.strip()]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"the run's configuration: experiment is not TOML: {error}") from None
    for key, value in (*single.items(), *changes):
        if _at(tables, key) == WITHHELD:
            raise InputError(
                f"{key}: only the server may have this value, but clients receive the run's configuration; set it in "
                f"the app's experiment"
            )
        put(tables, key, value)
    others = {key: value for key, value in config.items() if key not in single and key != SET}
    return others | {EXPERIMENT: to_toml(tables)}
