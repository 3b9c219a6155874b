"""Experiments as the configuration of a Flower app, with one key for each setting that is a single value.

``flwr run app --run-config 'method.rounds=4'`` changes a key that the app has. Settings without a default are not keys;
``set = "run.min_clients=3; run.patience=2"`` sets them. A key that is "(default)" is left out of the experiment, so
that its value may follow from other keys, such as alpha from a changed rank. Lists, and tables whose keys a user chose,
stay in ``experiment``, one inline table of TOML. Server and clients rebuild the same text. This module imports no large
library, since a new process answers each message.

Paths of an app are relative, since an app is for any machine. The ServerApp and simulated clients look for them in the
folder ``home``; silos do not read them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedfm.core.overrides import parse_override
from fedfm.core.toml_text import check_depth, leaves, put, to_toml
from fedfm.data.spec import WITHHELD
from fedfm.errors import InputError

EXPERIMENT, SET = "experiment", "set"
OUT, RUN, HOME = "out", "run-name", "home"  # the folder of run directories, the name of one, where paths start
LONGEST = 1 << 20  # bytes of an experiment's text
DEFAULT = "(default)"  # the value of a key that the experiment does not have
_NAME = "name"  # the only setting outside tables


def split_settings(
    experiment: str, fixed: frozenset[str], given: Callable[[str], bool] = lambda key: True
) -> dict[str, Any]:
    """Split an experiment's text into the configuration of an app.

    Args:
        fixed: settings that stay in the text, so that they cannot be changed.
        given: whether a key is kept; others are :data:`DEFAULT`, or left out if they are lists.
    """
    tables = tomllib.loads(experiment)
    found = [(key, value) for key, value in settings(tables) if key not in fixed and value != DEFAULT]
    single = {key: value if given(key) else DEFAULT for key, value in found}
    lists = [key for key, _ in settings(tables, (list,)) if not given(key)]
    for key in (*single, *lists):
        _take_out(tables, key.split("."))
    whole = to_toml({"": {"": tables}})  # below a section, TOML is written inline
    return {SET: "", **single, EXPERIMENT: whole.split(" = ", 1)[1].strip()}


def _take_out(table: dict[str, Any], path: list[str]) -> None:
    """Delete a value, and the tables that have nothing else: :func:`put` makes them again."""
    first, *rest = path
    if rest:
        _take_out(table[first], rest)
    if not rest or not table[first]:
        del table[first]


def settings(table: Mapping[str, Any], kinds: tuple[type, ...] = (bool, int, float, str)) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of these types, without names that a user chose, such as a client's."""
    for keys, value in leaves(table):
        if isinstance(value, kinds) and value != WITHHELD and all(key.replace("_", "a").isalnum() for key in keys):
            yield ".".join(keys), value


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
    inline = isinstance(text, str) and text.startswith("{")
    if not isinstance(text, str) or not (single or more or inline):
        return dict(config)
    size = len(text) + len(more) + sum(len(key) + len(str(value)) for key, value in single.items())
    if size > LONGEST:
        raise InputError(f"the run's configuration has no experiment of at most {LONGEST} bytes")
    for written in (text, *(f"{key} =" for key in single), more):
        check_depth(written)
    try:
        tables = tomllib.loads(f"inline = {text}" if inline else text)
        changes = [parse_override(part) for part in more.split(";") if part.strip()]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"the run's configuration: experiment is not TOML: {error}") from None
    if inline:
        if len(tables) > 1:
            raise InputError("the run's configuration: experiment has lines after its table")
        tables = tables["inline"]
    for key, value in (*((key, value) for key, value in single.items() if value != DEFAULT), *changes):
        if _at(tables, key) == WITHHELD:
            raise InputError(
                f"{key}: only the server may have this value, but clients receive the run's configuration; set it in "
                f"the app's experiment"
            )
        put(tables, key, value)
    others = {key: value for key, value in config.items() if key not in single and key != SET}
    return others | {EXPERIMENT: to_toml(tables)}


def run_folder(config: Mapping[str, Any], run_id: int) -> Path:
    """The run directory of an app on this machine; Flower's run gives it a name if the configuration has none."""
    return _home(config) / str(config.get(OUT) or "runs") / str(config.get(RUN) or f"run-{run_id}")


def with_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """The experiment of a merged configuration as tables, with absolute paths of the files that are in ``home``."""
    tables = tomllib.loads(str(config[EXPERIMENT]))
    return rename_paths(tables, lambda path: str((_home(config) / path).resolve()), _home(config))


def rename_paths(tables: dict[str, Any], rename: Callable[[Path], str], start: Path) -> dict[str, Any]:
    """The tables of an experiment, with each path that exists renamed; other names, such as those of a hub, stay.

    Args:
        start: where relative paths start.
    """

    def path(text: Any) -> Any:
        there = isinstance(text, str) and text not in ("", WITHHELD) and (start / text).exists()
        return rename(Path(text)) if there else text

    renamed = {}
    for section, keys in (("data", ("path", "hub")), ("model", ("name",))):
        if isinstance(table := tables.get(section), Mapping):
            renamed[section] = {**table, **{key: path(table[key]) for key in keys if key in table}}
    if isinstance(clients := renamed.get("data", {}).get("clients"), Mapping):
        renamed["data"]["clients"] = {name: path(file) for name, file in clients.items()}
    return tables | renamed


def _home(config: Mapping[str, Any]) -> Path:
    return Path(str(config.get(HOME) or "")).resolve()
