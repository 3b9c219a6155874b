"""Convert tables of a TOML file to frozen dataclasses and back. Errors name the key and the expected value."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from fedfm.aggregation.base import Aggregator
from fedfm.attacks.attack import Attack
from fedfm.config.paths import resolve_paths
from fedfm.config.registry import available, name_of, ours, resolve
from fedfm.core.fields import KINDS, bounds_of, check, key_of, needs_value, outside, owners_of, plain_type, types_of
from fedfm.core.method import Method
from fedfm.core.open_settings import class_for
from fedfm.core.toml_text import put as put
from fedfm.core.toml_text import to_toml as to_toml
from fedfm.errors import Absent, Faults, InputError, quote_names, reason_of
from fedfm.training import SGD, Local

_DATA = (".csv", ".jsonl", ".jsonl.gz", ".parquet", ".npz", ".txt", ".txt.gz")  # formats that data.path takes


def read(path: str | Path, overrides: Mapping[str, Any], takes: str) -> dict[str, Any]:
    """The nested tables of a TOML file, with paths resolved by :func:`fedfm.config.paths.resolve_paths`.

    Args:
        overrides: values by key ``a.b.c``; a path among these values is relative to the working directory.
        takes: what the command expects, for the message if the file is absent or contains data.

    Raises:
        InputError: the file is absent, cannot be read, or is not TOML.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors begin a file with a mark
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; {takes}") from None
    except (IsADirectoryError, ValueError, RecursionError) as error:
        # ValueError: the file is not UTF-8, is not TOML, or has a number of too many digits.
        if (path / "manifest.json").exists():
            message = f"{path} is the directory of a run, which `fedfm resume {path}` continues; {takes}"
        elif path.is_dir() or path.name.lower().endswith(_DATA):
            message = f'{path} looks like data; {takes}, whose [data] names the file: path = "{path}"'
        else:
            message = f"{path}: not TOML: {reason_of(error)}"
        raise InputError(message) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        table = resolve_paths(path, table, overrides)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    for key, value in overrides.items():
        put(table, key, value)
    return table


def refuse_unknown(table: Mapping[str, Any], known: Any, path: str) -> None:
    """Refuse unknown keys; ``path`` is the table's name, "" for the file.

    Raises:
        UnknownKey: for the first unknown key; its ``more`` has the others.
    """
    faults = Faults()
    for key in table:
        if key not in known:
            from fedfm.config.key_suggestions import UnknownKey

            faults.add(UnknownKey(key, known, path))
    faults.refuse()


def build(cls: type, table: Any, path: str) -> Any:
    """An instance of a dataclass from a table.

    Raises:
        InputError: a key is unknown, missing or of a wrong type; the message has its path, and ``more`` has the other
            faults of the table.
    """
    if not isinstance(table, Mapping):
        text = f"{path} = {table!r}: expected a table, e.g. {{ name = ... }}"
        raise InputError(text, key=path, allowed="a table")
    cls = class_for(cls, table)
    hints = types_of(cls)
    known = {key_of(f.name): f for f in fields(cls) if f.init}
    at, faults, found = f"{path}." if path else "", Faults(), dict[str, Any]()
    with faults:
        refuse_unknown(table, known, path)
    for key, value in table.items():
        if (of := known.get(key)) is None:
            continue
        if (own := own_default(of)) is not None and isinstance(value, Mapping) and "name" not in value:
            value = plain_or_name(own) | dict(value)
        if isinstance(value, str) and value == of.metadata.get("alone"):
            value = (value,)  # a single word instead of a list
        if isinstance(value, bool) and (word := of.metadata.get("true")):
            if not value and "false" not in of.metadata:
                continue
            value = word if value else of.metadata["false"]
        with faults:
            found[of.name] = convert(value, hints[of.name], f"{at}{key}", of.metadata.get("help", ""))
    for key, of in known.items():
        if key not in table and needs_value(of):
            allowed = bounds_of(of).words_for(hints[of.name])
            faults.add(Absent(f"{at}{key} is missing: expected {allowed}", key=f"{at}{key}", allowed=allowed))
    if faults.found:  # no instance is made, so run its other checks here
        for fault in _of_fields(known, table, found, hints, at):
            faults.add(fault)
    faults.refuse()
    return cls(**found)


def own_default(field: Field[Any]) -> Local | None:
    """The field's default client optimiser, whose values complete a table without a name; None if there is none."""
    default: Any = field.default
    own = isinstance(default, Local) and (type(default) is SGD or not isinstance(default, SGD))
    return default if isinstance(default, Local) and own else None


def _of_fields(
    known: Mapping[str, Field[Any]],
    table: Mapping[str, Any],
    found: Mapping[str, Any],
    hints: Mapping[str, Any],
    at: str,
) -> list[InputError]:
    """Faults of the values that were read, and of required keys that are absent."""
    faults = Faults()
    for key, of in known.items():
        where, hint = f"{at}{key}", hints[of.name]
        absent = key not in table and of.metadata.get("required") and not owners_of(of)
        if of.name not in found and not absent:
            continue
        value = found.get(of.name, of.default)
        if is_dataclass(value):
            with faults:
                check(value, where)
        wrong = [*outside(of, hint, value, where)]
        if absent and not wrong:
            allowed = bounds_of(of).words_for(hint)
            wrong = [Absent(f"{where} is missing: expected {allowed}", key=where, allowed=allowed)]
        for fault in wrong:
            faults.add(fault)
    return faults.found


def convert(value: Any, hint: Any, path: str, meaning: str = "") -> Any:
    """``value`` as the type ``hint``. Integers are accepted for a float; nothing else is converted.

    Args:
        meaning: what the expected table holds; part of the message if the value is not a table.

    Raises:
        InputError: the value has another type.
    """
    both = isinstance(hint, UnionType) and str in get_args(hint) and isinstance(value, str)  # a text for "float | str"
    hint = str if both else plain_type(hint)
    origin, args = get_origin(hint), get_args(hint)
    _refuse_wide(value, path, deep=hint is Any)
    if kind := kind_of(hint):
        default = "sgd" if kind == "optimisers" else hint.__module__.rpartition(".")[2]
        return build_named(kind, value, path, default=default, of=hint)[1]
    if is_dataclass(hint):
        return build(hint, value, path)  # type: ignore[arg-type]
    if hint is Any:
        return value
    if hint is float and type(value) is int:
        value = float(value)
    if hint in (int, float, str, bool):
        if type(value) is not hint or (hint is float and value != value):
            text = f"{path} = {json.dumps(value, default=str)}: expected {_words(hint)}"
            raise InputError(text, key=path, allowed=_words(hint))
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(convert(v, args[0], f"{path}[{i}]") for i, v in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {k: convert(v, args[1], f"{path}.{k}") for k, v in value.items()}
    says = f" ({meaning})" if origin is dict and meaning else ""
    text = f"{path} = {json.dumps(value, default=str)}: expected {_words(hint)}{says}"
    raise InputError(text, key=path, allowed=_words(hint))


def _refuse_wide(value: Any, path: str, deep: bool) -> None:
    """Refuse a whole number of more than 64 bits. TOML has no such number, and arithmetic on it may take long.

    Args:
        deep: whether to look into lists and tables, which no other code checks.
    """
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise InputError(f"{path}: a whole number of {value.bit_length()} bits; expected one of at most 64", key=path)
    if deep:
        inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for key, one in inner:
            _refuse_wide(one, f"{path}.{key}", deep)


def _words(hint: Any) -> str:
    return KINDS.get(hint) or {tuple: "a list", dict: "a table"}.get(get_origin(hint), str(hint))


def build_named(kind: str, table: Any, path: str, *, default: str = "", of: type = object) -> tuple[str, Any]:
    """(name, instance) of a method, a client optimiser, an attack or an aggregation that a table names.

    Args:
        default: the name if the table has none.
        of: base class that the named class must have.

    Raises:
        InputError: no such name, or as :func:`build`.
    """
    if not isinstance(table, Mapping):
        example = f'{{ name = "{default}" }}' if default else "{ name = ... }"
        text = f"{path} = {table!r:.80}: expected a table, e.g. {example}"
        raise InputError(text, key=path, allowed="a table")
    table = dict(table)
    name = table.pop("name", default)
    if name == "":
        names = quote_names(available(kind))
        raise Absent(f"{path}.name is missing: expected {names}", key=f"{path}.name", allowed=names)
    cls = resolve(kind, name, f"{path}.name")
    if not issubclass(cls, of):
        fit = quote_names(n for n in ours(kind) if issubclass(resolve(kind, n), of))
        raise InputError(f'{path}.name = "{name}": expected {fit}', key=f"{path}.name", allowed=fit)
    return name, build(cls, table, path)


def kind_of(cls: Any) -> str:
    """The kind under which the registry lists a class, e.g. "methods"; "" if it lists no classes of this base."""
    kinds = {"optimisers": Local, "methods": Method, "attacks": Attack, "aggregation": Aggregator}
    return next((kind for kind, base in kinds.items() if isinstance(cls, type) and issubclass(cls, base)), "")


def plain(value: Any) -> Any:
    """Dataclasses as nested tables, without keys that have no value."""
    if is_dataclass(value) and not isinstance(value, type):
        table = {key_of(f.name): plain_or_name(getattr(value, f.name)) for f in fields(value)}
        return {key: inner for key, inner in table.items() if inner is not None}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return value


def plain_or_name(value: Any) -> Any:
    """Like :func:`plain`, but with the name of a value that the registry knows."""
    kind = kind_of(type(value))
    name = name_of(kind, value) if kind else ""
    return {"name": name} | plain(value) if name else plain(value)
