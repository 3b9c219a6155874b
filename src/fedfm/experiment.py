"""Experiment: one TOML file -> frozen dataclasses. Strict: what is not known, or makes no sense, is refused with its
place.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from fedfm.data.spec import IN_MEMORY, DataSpec
from fedfm.errors import InputError
from fedfm.models.spec import AdaptationSpec, ModelSpec

ENGINES = ("local", "simulation", "deployment")


@dataclass(frozen=True)
class PrivacySpec:
    """The [privacy] table: what is claimed, and how it is kept."""

    aggregator: str = field(default="plain", metadata={"help": "plain or secagg"})
    mechanism: str | None = field(default=None, metadata={"help": "gaussian, distributed_gaussian, dp_sgd"})
    unit: str | None = field(default=None, metadata={"help": "client or record"})
    target_epsilon: float | None = field(default=None, metadata={"help": "calibrate the noise to this epsilon"})
    noise_multiplier: float | None = field(default=None, metadata={"help": "sigma / clip_norm, instead"})
    delta: float | None = field(default=None, metadata={"help": "of (epsilon, delta)"})
    clip_norm: float | None = field(default=None, metadata={"help": "bound C on an update's norm"})
    halt_at_epsilon: float | None = field(default=None, metadata={"help": "stop before spending more"})


@dataclass(frozen=True)
class AttackSpec:
    """The [attack] table: what some clients do."""

    name: str = field(default="", metadata={"help": "none is built in yet"})
    fraction: float = field(default=0.0, metadata={"help": "of the clients"})


@dataclass(frozen=True)
class RunSpec:
    """The [run] table: engine, seed, limits."""

    engine: str = field(default="local", metadata={"help": "local, simulation or deployment"})
    seed: int = field(default=0, metadata={"help": "every random stream but secrets derives from it"})
    min_clients: int = field(default=1, metadata={"help": "fewer valid replies than this stop the run"})
    timeout: float = field(default=600.0, metadata={"help": "seconds that a client may take"})
    kernels: str = field(default="exact", metadata={"help": "exact, or fast: packed cohorts, equal within a tolerance"})
    workers: int = field(default=0, metadata={"help": "processes on the local engine; 0: one a core"})
    wire: bool = field(default=False, metadata={"help": "local engine: serialise every message as a network would"})
    superlink: str | None = field(default=None, metadata={"help": "deployment: attach to this host:port"})
    root_certificates: str | None = field(default=None, metadata={"help": "PEM file of the superlink's authority"})
    evaluate_every: int = field(default=1, metadata={"help": "rounds between evaluations; 0: only at the end"})
    patience: int = field(default=0, metadata={"help": "stop after so many rounds without a better validation loss"})


@dataclass(frozen=True)
class Experiment:
    """Everything that defines a run, with every default filled in.

    Example:
        >>> e = Experiment.from_dict({
        ...     "data": {"name": "digits"}, "model": {"name": "nano-vit"}, "method": {"name": "fedavg"}})
        >>> e.method.rounds
        10
    """

    name: str
    data: DataSpec
    model: ModelSpec
    method: Any  # Method
    method_name: str
    privacy: PrivacySpec | None
    attack: AttackSpec | None
    run: RunSpec
    tuning: tuple[dict[str, Any], ...] = ()  # what a search before this run tried, and what it cost

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
        """Read a TOML file; relative data and model paths in it are relative to where the command runs.

        Raises:
            InputError: the file is absent, not TOML, or not a valid experiment.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise InputError(f"{path}: no such file; `fedfm run exp.toml` takes an experiment in TOML") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from None
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path}: not TOML: {error}") from None
        for key, value in (overrides or {}).items():
            put(table, key, value)
        try:
            return cls.from_dict(table)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Experiment:
        """Build from nested tables as TOML gives them.

        Raises:
            InputError: with the key, what it is, and what would be right.
        """
        known = {"name", "data", "model", "method", "privacy", "attack", "run"}
        _refuse_unknown(table, known, "")
        for section in ("data", "model", "method"):
            if section not in table:
                raise InputError(f"[{section}] is missing; an experiment has [data], [model] and [method]")
        for section in known - {"name"}:
            if section in table and not isinstance(table[section], Mapping):
                raise InputError(f"{section} = {table[section]!r}: expected a table [{section}]")
        data = build(DataSpec, table["data"], "data")
        model = build(ModelSpec, table["model"], "model")
        method_name, method = build_method(table["method"])
        privacy = build(PrivacySpec, table["privacy"], "privacy") if "privacy" in table else None
        attack = build(AttackSpec, table["attack"], "attack") if "attack" in table else None
        run = build(RunSpec, table.get("run", {}), "run")
        if model.adaptation is None and model.name != IN_MEMORY:
            model = dataclasses.replace(
                model, adaptation=AdaptationSpec(name="head" if model.name == "features" else type(method).adaptation)
            )
        name = table.get("name") or f"{method_name}-{_data_name(data)}"
        if not isinstance(name, str) or not name.strip() or any(c in name for c in "/\\\0"):
            raise InputError(f"name = {name!r}: expected a text without slashes")
        experiment = cls(name, data, model, method, method_name, privacy, attack, run)
        experiment._validate()
        return experiment

    def _validate(self) -> None:
        sources = [k for k in ("name", "path", "hub", "clients") if getattr(self.data, k) is not None]
        if len(sources) != 1:
            what = " and ".join(sources) or "none"
            raise InputError(f"[data]: expected exactly one of name, path, hub, clients; got {what}")
        if not self.model.name:
            raise InputError('model.name is missing: expected "nano-vit", a folder, a hub id, or "features"')
        if (self.data.name == IN_MEMORY) != (self.model.name == IN_MEMORY):
            raise InputError(f'"{IN_MEMORY}": data and model are given by fedfm.federate(...), both or neither')
        if self.in_memory and self.run.engine != "local":
            raise InputError(f'run.engine = "{self.run.engine}": data and model in memory run on engine = "local" only')
        _one_of("model.weights", self.model.weights, ("pretrained", "random"))
        _one_of("model.dtype", self.model.dtype, ("float32", "bfloat16", "float16"))
        _one_of("model.device", self.model.device.partition(":")[0], ("auto", "cpu", "cuda", "mps"))
        if self.model.max_length < 2:
            raise InputError(f"model.max_length = {self.model.max_length}: expected a whole number of at least 2")
        self.method.validate()
        run = self.run
        _one_of("run.engine", run.engine, ENGINES)
        _one_of("run.kernels", run.kernels, ("exact", "fast", "fast_bf16"))
        for key, low in (("min_clients", 1), ("workers", 0), ("evaluate_every", 0), ("patience", 0), ("seed", 0)):
            if getattr(run, key) < low:
                raise InputError(f"run.{key} = {getattr(run, key)}: expected a whole number of at least {low}")
        if not run.timeout > 0:
            raise InputError(f"run.timeout = {run.timeout}: expected seconds above 0")
        if run.superlink is not None and run.engine != "deployment":
            raise InputError(f'run.superlink: only engine = "deployment" attaches to one, not "{run.engine}"')
        if run.wire and run.engine != "local":
            raise InputError(f'run.wire: engine = "{run.engine}" always serialises; drop it')
        if getattr(self.method, "pools", False) and run.engine != "local":
            raise InputError(f'method "{self.method_name}" pools all rows in one place: expected run.engine = "local"')
        if run.patience and not self.data.val_fraction:
            raise InputError("run.patience: early stopping judges validation rows; set data.val_fraction, e.g. 0.1")
        if self.privacy is not None:
            self._validate_privacy(self.privacy)
        if self.attack is not None:
            raise InputError(f'attack.name = "{self.attack.name}": no attack is built in yet; drop [attack]')

    def _validate_privacy(self, privacy: PrivacySpec) -> None:
        for key in ("target_epsilon", "noise_multiplier", "clip_norm", "halt_at_epsilon"):
            value = getattr(privacy, key)
            if value is not None and not value > 0:
                raise InputError(f"privacy.{key} = {value}: expected a number above 0")
        if privacy.delta is not None and not 0 < privacy.delta < 1:
            raise InputError(f"privacy.delta = {privacy.delta}: expected a number in (0, 1)")
        asked = [f.name for f in fields(privacy) if getattr(privacy, f.name) != f.default]
        if asked:
            raise InputError(
                f"privacy.{asked[0]}: this release has no mechanism and no secure aggregation yet, and claims nothing "
                "that it does not keep; drop [privacy]"
            )

    @property
    def in_memory(self) -> bool:
        """Data and model came from a Python program, :func:`fedfm.federate`."""
        return self.data.name == IN_MEMORY

    def to_dict(self) -> dict[str, Any]:
        """Nested tables with every default filled in; ``from_dict`` takes them back."""
        method = {"name": self.method_name} | _plain(self.method)
        tables = {"name": self.name, "data": _plain(self.data), "model": _plain(self.model), "method": method}
        if self.privacy is not None:
            tables["privacy"] = _plain(self.privacy)
        if self.attack is not None:
            tables["attack"] = _plain(self.attack)
        return tables | {"run": _plain(self.run)}

    def to_toml(self) -> str:
        """The experiment as a TOML file with every default filled in; keys without a value are left out."""
        return to_toml(self.to_dict())


def _data_name(data: DataSpec) -> str:
    if data.clients:
        return "silos"
    return Path(data.name or data.path or data.hub or "data").name.split(".")[0]


def _one_of(where: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise InputError(f'{where} = "{value}": expected {_list(options)}{_close(value, options)}')


def _list(options: Any) -> str:
    return ", ".join(f'"{o}"' for o in sorted(options))


def _close(value: str, options: Any) -> str:
    near = difflib.get_close_matches(str(value), list(options), 1)
    return f' (did you mean "{near[0]}"?)' if near else ""


def _refuse_unknown(table: Mapping[str, Any], known: Any, path: str) -> None:
    for key in table:
        if key not in known:
            where = f"{path}.{key}" if path else f"{key}"
            raise InputError(
                f"{where}: unknown key{_close(key, known)}; {f'[{path}]' if path else 'the file'} takes {_list(known)}"
            )


def build(cls: type, table: Any, path: str) -> Any:
    """An instance of a dataclass from a table.

    Raises:
        InputError: an unknown key, a wrong type, a missing key; named by its path.
    """
    if not isinstance(table, Mapping):
        raise InputError(f"{path} = {table!r}: expected a table, e.g. {{ name = ... }}")
    hints = get_type_hints(cls)
    known = {f.name: f for f in fields(cls) if f.init}
    _refuse_unknown(table, known, path)
    return cls(**{key: convert(value, hints[key], f"{path}.{key}") for key, value in table.items()})


def convert(value: Any, hint: Any, path: str) -> Any:
    """``value`` as ``hint`` says; whole numbers pass as floats, nothing else is coerced."""
    from fedfm.training import Local

    origin, args = get_origin(hint), get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [a for a in args if a is not types.NoneType]
        return convert(value, options[0], path)
    if hint is Local:
        return build_local(value, path)
    if is_dataclass(hint):
        return build(hint, value, path)  # type: ignore[arg-type]
    if hint is Any:
        return value
    if hint is float and type(value) is int:
        value = float(value)
    if hint in (int, float, str, bool):
        if type(value) is not hint or (hint is float and value != value):
            raise InputError(f"{path} = {json.dumps(value, default=str)}: expected {_words(hint)}")
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(convert(v, args[0], f"{path}[{i}]") for i, v in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {k: convert(v, args[1], f"{path}.{k}") for k, v in value.items()}
    raise InputError(f"{path} = {json.dumps(value, default=str)}: expected {_words(hint)}")


def _words(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
    return names.get(hint) or {tuple: "a list", dict: "a table"}.get(get_origin(hint), str(hint))


def build_local(table: Any, path: str) -> Any:
    """A client optimiser from its table; ``name`` says which, sgd by default."""
    from fedfm.training import BY_NAME

    if not isinstance(table, Mapping):
        raise InputError(f"{path} = {table!r}: expected a table, e.g. {{ learning_rate = 0.1 }}")
    table = dict(table)
    name = table.pop("name", "sgd")
    if name not in BY_NAME:
        raise InputError(f'{path}.name = "{name}": expected {_list(BY_NAME)}{_close(name, BY_NAME)}')
    return build(BY_NAME[name], table, path)


def build_method(table: Mapping[str, Any]) -> tuple[str, Any]:
    """(name, method) of the [method] table."""
    table = dict(table)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise InputError(f"method.name is missing: expected {_list(available('methods'))}")
    cls = resolve("methods", name)
    return name, build(cls, table, "method")


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
        raise InputError(f'{kind.removesuffix("s")}.name = "{name}": expected {_list(names)}{_close(name, names)}')
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


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        from fedfm.training import BY_NAME

        table = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        by_class: dict[type, str] = {c: n for n, c in BY_NAME.items()}
        return ({"name": by_class[type(value)]} | table) if type(value) in by_class else _present(table)
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _present(table: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in table.items() if v is not None}


def put(table: dict[str, Any], key: str, value: Any) -> None:
    """Set ``a.b.c`` in nested tables."""
    *path, last = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise InputError(f"--set {key}: {part} is not a table")
    table[last] = value


def parse_override(text: str) -> tuple[str, Any]:
    """``method.rounds=5`` -> ("method.rounds", 5); the value is TOML, or a bare word."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise InputError(f"--set {text}: expected key=value, e.g. --set method.rounds=5")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def to_toml(tables: Mapping[str, Any]) -> str:
    """Nested tables as TOML: one section a table, deeper ones inline."""

    def inline(value: Any) -> str:
        if isinstance(value, Mapping):
            return "{ " + ", ".join(f"{_bare(k)} = {inline(v)}" for k, v in value.items() if v is not None) + " }"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(inline, value)) + "]"
        return json.dumps(value, ensure_ascii=False)

    top = [f"{_bare(k)} = {inline(v)}" for k, v in tables.items() if not isinstance(v, Mapping)]
    for section, table in tables.items():
        if isinstance(table, Mapping):
            top += ["", f"[{_bare(section)}]"] + [
                f"{_bare(k)} = {inline(v)}" for k, v in table.items() if v is not None
            ]
    return "\n".join(top).strip() + "\n"


def _bare(key: str) -> str:
    return key if key and all(c.isalnum() or c in "-_" for c in key) and key.isascii() else json.dumps(key)
