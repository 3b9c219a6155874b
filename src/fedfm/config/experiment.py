"""Experiment: one TOML file -> frozen dataclasses. Strict: what is not known, or makes no sense, is refused with its
place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.mean import Mean
from fedfm.attacks.attack import Attack
from fedfm.config.registry import admit_named, available, name_of, resolve
from fedfm.config.toml import build, plain, read, refuse_unknown, to_toml
from fedfm.core.capabilities import Private, Sampling
from fedfm.core.method import Method
from fedfm.data.spec import IN_MEMORY, WITHHELD, DataSpec
from fedfm.errors import InputError, listed, one_of
from fedfm.models.adapters.adaptation import check as check_adaptation
from fedfm.models.load import TASKS
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import TrainsLocally

T = TypeVar("T")
ENGINES = ("local", "simulation", "deployment")


@dataclass(frozen=True)
class PrivacySpec:
    """The [privacy] table: what is claimed, and how it is kept."""

    aggregator: str = field(default="plain", metadata={"help": "plain; secagg is not in this release"})
    mechanism: str | None = field(default=None, metadata={"help": "gaussian, distributed_gaussian, dp_sgd"})
    unit: str | None = field(default=None, metadata={"help": "client or record"})
    target_epsilon: float | None = field(default=None, metadata={"help": "calibrate the noise to this epsilon"})
    noise_multiplier: float | None = field(default=None, metadata={"help": "sigma / clip_norm, instead"})
    delta: float | None = field(default=None, metadata={"help": "of (epsilon, delta)"})
    clip_norm: float | None = field(default=None, metadata={"help": "bound C on an update's norm"})
    halt_at_epsilon: float | None = field(default=None, metadata={"help": "stop before spending more"})


@dataclass(frozen=True)
class RunSpec:
    """The [run] table: engine, seed, limits."""

    engine: str = field(default="local", metadata={"help": "local, simulation or deployment"})
    seed: int = field(default=0, metadata={"help": "every random stream but secrets derives from it"})
    min_clients: int = field(default=1, metadata={"help": "fewer valid replies than this stop the run"})
    timeout: float = field(default=600.0, metadata={"help": "seconds that a client may take"})
    kernels: str = field(
        default="exact",
        metadata={
            "help": "exact, or fast: packed cohorts, equal within a tolerance; fast_bf16 multiplies in bfloat16, too, "
            "which not every processor is quick at (`fedfm doctor` tells)"
        },
    )
    workers: int = field(default=0, metadata={"help": "processes on the local engine; 0: one a core, on a GPU one"})
    wire: bool = field(default=False, metadata={"help": "local engine: serialise every message as a network would"})
    superlink: str | None = field(default=None, metadata={"help": "deployment: attach to this host:port"})
    root_certificates: str | None = field(default=None, metadata={"help": "PEM file of the superlink's authority"})
    evaluate_every: int = field(default=1, metadata={"help": "rounds between evaluations; 0: only at the end"})
    patience: int = field(
        default=0,
        metadata={"help": "stop after so many rounds without a better validation loss; the best round's model is kept"},
    )
    local_scores: bool = field(
        default=False, metadata={"help": "clients tell their model's accuracy after local training, before aggregation"}
    )
    target_accuracy: float | None = field(
        default=None, metadata={"help": "the ledger counts rounds and multiply-accumulates until it is reached"}
    )


@dataclass(frozen=True, init=False)
class Experiment:
    """Everything that defines a run, with every default filled in and checked.

    Its arguments are named as the tables of the file; each is a table, or the object that it stands for, e.g.
    ``method=FedAvg(rounds=3)``.

    Example:
        >>> e = Experiment(data={"name": "digits"}, model={"name": "nano-vit"}, method={"name": "fedavg"})
        >>> e.method.rounds
        10
    """

    name: str
    data: DataSpec
    model: ModelSpec
    method: Any  # Method
    method_name: str
    privacy: PrivacySpec | None
    attack: Attack | None
    run: RunSpec
    aggregation: Aggregator
    tuning: tuple[dict[str, Any], ...]  # what a search before this run tried, and what it cost

    def __init__(
        self,
        data: DataSpec | Mapping[str, Any],
        model: ModelSpec | Mapping[str, Any],
        method: Any,
        *,
        name: str | None = None,
        privacy: PrivacySpec | Mapping[str, Any] | None = None,
        attack: Attack | Mapping[str, Any] | None = None,
        aggregation: Aggregator | Mapping[str, Any] | None = None,
        run: RunSpec | Mapping[str, Any] | None = None,
        method_name: str | None = None,
        tuning: tuple[dict[str, Any], ...] = (),
    ) -> None:
        """Build and check; ``dataclasses.replace`` alone gives ``method_name``, and changes what was checked before.

        Raises:
            InputError: with the key, what it is, and what would be right.
        """
        changed = method_name is not None
        data, model = _built(DataSpec, data, "data"), _built(ModelSpec, model, "model")
        if isinstance(method, Mapping):
            method_name, method = build_method(method)
        elif not isinstance(method, Method):
            raise InputError(f'method = {method!r:.80}: expected a table, e.g. {{"name": "fedavg"}}, or a Method')
        privacy = None if privacy is None else _built(PrivacySpec, privacy, "privacy")
        method = method.settled(privacy) if isinstance(method, Private) else method
        if attack is not None and not isinstance(attack, Attack):
            attack = named("attacks", attack, "attack")
        if aggregation is None or isinstance(aggregation, Mapping):
            aggregation = named("aggregation", {"name": "mean"} | dict(aggregation or {}), "aggregation")
        run = _built(RunSpec, {} if run is None else run, "run")
        method_name = method_name or name_of("methods", method)
        if model.adaptation is not None or model.name != IN_MEMORY:
            default = "head" if model.name == "features" else method.needs.adaptation
            adaptation = check_adaptation(model.adaptation or AdaptationSpec(name=default))
            model = dataclasses.replace(model, adaptation=adaptation)
        name = f"{method_name}-{_data_name(data)}" if name is None else name
        if not isinstance(name, str) or not name.strip() or any(c in name for c in "/\\\0") or len(name) > 200:
            raise InputError(f"name = {name!r:.80}: expected a text of at most 200 characters, without slashes")
        given = {"name": name, "data": data, "model": model, "method": method, "method_name": method_name}
        given |= {"privacy": privacy, "attack": attack, "run": run, "aggregation": aggregation, "tuning": tuning}
        for key, value in given.items():
            object.__setattr__(self, key, value)
        if not changed:
            self._validate()
            if privacy is not None:
                object.__setattr__(self, "method", protected(method, privacy))

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
        """Read a TOML file; relative data and model paths in it are relative to where the command runs.

        Raises:
            InputError: the file is absent, not TOML, or not a valid experiment.
        """
        table = read(path, overrides or {}, "`fedfm run exp.toml` takes an experiment in TOML")
        try:
            return cls.from_dict(table, imports=True)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], *, imports: bool = False) -> Experiment:
        """Build from nested tables as TOML gives them.

        Args:
            imports: also import the classes that it names as ``module:Class`` or by an entry point. Only for tables
                that this process's owner wrote: importing a module runs it.

        Raises:
            InputError: with the key, what it is, and what would be right.
        """
        known = {"name", "data", "model", "method", "privacy", "attack", "aggregation", "run"}
        refuse_unknown(table, known, "")
        for section in ("data", "model", "method"):
            if section not in table:
                raise InputError(f"[{section}] is missing; an experiment has [data], [model] and [method]")
        for section in known - {"name"}:
            if section in table and not isinstance(table[section], Mapping):
                raise InputError(f"{section} = {table[section]!r}: expected a table [{section}]")
        if imports:
            admit_named(table)
        return cls(**table)

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
        if self.model.task is not None:
            one_of("model.task", self.model.task, TASKS)
        one_of("model.weights", self.model.weights, ("pretrained", "random"))
        one_of("model.dtype", self.model.dtype, ("float32", "bfloat16", "float16"))
        one_of("model.device", self.model.device.partition(":")[0], ("auto", "cpu", "cuda", "mps"))
        if self.model.max_length < 2:
            raise InputError(f"model.max_length = {self.model.max_length}: expected a whole number of at least 2")
        if self.model.answer_tokens is not None and self.model.answer_tokens < 0:
            raise InputError(f"model.answer_tokens = {self.model.answer_tokens}: expected a whole number of at least 0")
        self.method.validate()
        self._validate_adaptation()
        run = self.run
        one_of("run.engine", run.engine, ENGINES)
        one_of("run.kernels", run.kernels, ("exact", "fast", "fast_bf16"))
        for key, low in (("min_clients", 1), ("workers", 0), ("evaluate_every", 0), ("patience", 0), ("seed", 0)):
            if getattr(run, key) < low:
                raise InputError(f"run.{key} = {getattr(run, key)}: expected a whole number of at least {low}")
        if not run.timeout > 0:
            raise InputError(f"run.timeout = {run.timeout}: expected seconds above 0")
        if run.superlink is not None and run.engine != "deployment":
            raise InputError(f'run.superlink: only engine = "deployment" attaches to one, not "{run.engine}"')
        if run.wire and run.engine != "local":
            raise InputError(f'run.wire: engine = "{run.engine}" always serialises; drop it')
        if self.method.needs.pooled and run.engine != "local":
            raise InputError(f'method "{self.method_name}" pools all rows in one place: expected run.engine = "local"')
        if run.target_accuracy is not None and not 0 < run.target_accuracy <= 1:
            raise InputError(f"run.target_accuracy = {run.target_accuracy}: expected a number in (0, 1]")
        if run.local_scores and self.privacy is not None:
            raise InputError("run.local_scores: accuracies of single clients are covered by no [privacy]; drop one")
        if run.patience and not self.data.val_fraction:
            raise InputError("run.patience: early stopping judges validation rows; set data.val_fraction, e.g. 0.1")
        if run.patience and not run.evaluate_every:
            raise InputError(
                "run.patience: early stopping judges while the run goes on; run.evaluate_every = 0 never does"
            )
        if run.patience and self.privacy is not None:
            raise InputError("run.patience: validation losses of single clients are covered by no [privacy]; drop one")
        self.aggregation.validate()
        method = self.method
        if self.privacy is not None:
            self._validate_privacy(self.privacy)
            method = protected(method, self.privacy)  # it may call other client halves
        if self.attack is not None:
            if self.in_memory:
                raise InputError("[attack]: rows that were given from Python cannot be attacked; drop it")
            self.attack.validate(method, self.method_name)
        self._validate_aggregation(method)

    def _validate_adaptation(self) -> None:
        adaptation, needs = self.model.adaptation, self.method.needs
        takers = {needs.because or f'method "{self.method_name}"': needs.adaptations}
        if isinstance(self.method, TrainsLocally):
            takers["this client optimiser"] = self.method.local.adaptations
        for who, takes in takers.items():
            if takes and adaptation is not None and adaptation.name not in takes:
                raise InputError(f'model.adaptation.name = "{adaptation.name}": {who} takes {listed(takes)} only')
        if adaptation is not None and max(ranks := needs.ranks, default=0) > adaptation.rank:
            raise InputError(
                f"method.ranks = {list(ranks)}: {max(ranks)} is above model.adaptation.rank = {adaptation.rank}, the "
                "largest that the model has room for; raise that one, and set alpha"
            )

    def _validate_aggregation(self, method: Any) -> None:
        if isinstance(self.aggregation, Mean):
            return
        name = name_of("aggregation", self.aggregation)
        if not method.means:
            raise InputError(f'aggregation.name = "{name}": method "{self.method_name}" takes no mean; drop it')
        if self.privacy is not None:
            raise InputError(f'aggregation.name = "{name}": [privacy] is accounted for the mean; drop one of the two')

    def enough(self, clients: int) -> None:
        """Refuse ``run.min_clients`` and an aggregation for which a federation of so many clients is too small.

        Raises:
            InputError: with the number of clients that it needs.
        """
        fraction = self.method.fraction if isinstance(self.method, Sampling) else 1.0
        cohort, least = max(math.floor(fraction * clients + 1e-9), 1), self.aggregation.least()
        if self.run.min_clients > cohort and not self.method.needs.pooled:
            asks = f"a round asks {cohort} of {clients} clients" if cohort < clients else f"there are {clients} clients"
            raise InputError(f"run.min_clients = {self.run.min_clients}: {asks}")
        if cohort < least:
            raise InputError(
                f'aggregation.name = "{name_of("aggregation", self.aggregation)}": it needs {least} updates a round, '
                f"and a round asks {cohort} of {clients} clients"
            )

    def _validate_privacy(self, privacy: PrivacySpec) -> None:
        one_of("privacy.aggregator", privacy.aggregator, ("plain", "secagg"))
        if privacy.aggregator == "secagg":
            raise InputError(f'privacy.aggregator = "secagg": {self._why_not_hidden()}')
        for key in ("target_epsilon", "noise_multiplier", "clip_norm", "halt_at_epsilon"):
            value = getattr(privacy, key)
            if value is not None and not value > 0:
                raise InputError(f"privacy.{key} = {value}: expected a number above 0")
        if privacy.delta is not None and not 0 < privacy.delta < 1:
            raise InputError(f"privacy.delta = {privacy.delta}: expected a number in (0, 1)")
        for key in ("noise_multiplier", "clip_norm", "halt_at_epsilon"):
            if getattr(privacy, key) is not None:
                raise InputError(f"privacy.{key}: no mechanism of this release takes it; drop it")
        if privacy.target_epsilon is None:
            raise InputError("privacy.target_epsilon is missing: expected a number above 0")
        if privacy.delta is None:
            raise InputError("privacy.delta is missing: expected a number in (0, 1), e.g. 1e-5")
        if privacy.unit is None:
            raise InputError('privacy.unit is missing: expected "record" or "client", what one protected unit is')
        one_of("privacy.unit", privacy.unit, ("record", "client"))

    def _why_not_hidden(self) -> str:
        """What speaks against hiding updates in their sum."""
        if not isinstance(self.aggregation, Mean):
            name = name_of("aggregation", self.aggregation)
            return f'a robust rule compares single updates, secure aggregation hides them; drop it or "{name}"'
        method, privacy = self.method, self.privacy
        if privacy is not None and None not in (privacy.target_epsilon, privacy.delta):
            with contextlib.suppress(InputError):
                method = protected(method, privacy)  # it may need only a mean
        if method.asks:
            seen = " and ".join(method.asks)
            return f'the server of method "{self.method_name}" looks at single replies ({seen}); expected "plain"'
        if not method.means:
            return f'method "{self.method_name}" sends no update that could be hidden; drop [privacy]'
        return 'secure aggregation is not in this release, the server sees each update; expected "plain"'

    def server_only(self) -> dict[str, Any]:
        """What of the method only the server may know, by key."""
        marked = [f.name for f in dataclasses.fields(self.method) if f.metadata.get("server_only")]
        return {key: getattr(self.method, key) for key in marked}

    def for_clients(self) -> Experiment:
        """What clients are told of this experiment: server-only values are withheld."""
        method, model = self.method, self.model
        if withheld := dict.fromkeys(self.server_only(), WITHHELD):
            method = dataclasses.replace(method, **withheld)
        if method.needs.model == "server":
            model = dataclasses.replace(model, name=WITHHELD)
        return dataclasses.replace(self, method=method, model=model)

    def for_server(self, known: Mapping[str, Any]) -> Experiment:
        """The experiment again, of what clients are told and what the server knows.

        Raises:
            InputError: something that only the server knows is missing.
        """
        missing = [key for key, value in self.server_only().items() if value == WITHHELD and key not in known]
        if missing:
            raise InputError(f"method.{missing[0]}: withheld from clients, and the server has no value for it")
        values = {key: known[key] for key in self.server_only() if key in known}
        return dataclasses.replace(self, method=dataclasses.replace(self.method, **values)) if values else self

    @property
    def in_memory(self) -> bool:
        """Data and model came from a Python program, :func:`fedfm.federate`."""
        return self.data.name == IN_MEMORY

    def to_dict(self) -> dict[str, Any]:
        """Nested tables with every default filled in; ``from_dict`` takes them back."""
        method = {"name": self.method_name} | plain(self.method)
        tables = {"name": self.name, "data": plain(self.data), "model": plain(self.model), "method": method}
        if self.privacy is not None:
            tables["privacy"] = plain(self.privacy)
        if self.attack is not None:
            tables["attack"] = {"name": name_of("attacks", self.attack)} | plain(self.attack)
        tables["aggregation"] = {"name": name_of("aggregation", self.aggregation)} | plain(self.aggregation)
        return tables | {"run": plain(self.run)}

    def to_toml(self) -> str:
        """The experiment as a TOML file with every default filled in; keys without a value are left out."""
        return to_toml(self.to_dict())


def _built(cls: type[T], value: T | Mapping[str, Any], section: str) -> T:
    """An instance of a table's dataclass, from the table or as it is."""
    return value if isinstance(value, cls) else build(cls, value, section)


def _data_name(data: DataSpec) -> str:
    if data.clients:
        return "silos"
    return Path(data.name or data.path or data.hub or "data").name.split(".")[0]


def build_method(table: Mapping[str, Any]) -> tuple[str, Any]:
    """(name, method) of the [method] table."""
    table = dict(table)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise InputError(f"method.name is missing: expected {listed(available('methods'))}")
    cls = resolve("methods", name)
    return name, build(cls, table, "method")


def named(kind: str, table: Mapping[str, Any], section: str) -> Any:
    """An attack or an aggregation from its table."""
    if not isinstance(table, Mapping):
        raise InputError(f"{section} = {table!r:.80}: expected a table, e.g. {{ name = ... }}")
    table = dict(table)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise InputError(f"{section}.name is missing: expected {listed(available(kind))}")
    return build(resolve(kind, name), table, section)


def protected(method: Method[Any], privacy: PrivacySpec) -> Method[Any]:
    """The method under the [privacy] table.

    Raises:
        InputError: it has no mechanism of that kind.
    """
    if not isinstance(method, Private):
        raise InputError("privacy: this method has no mechanism of its own; drop [privacy]")
    return method.protected(privacy)
