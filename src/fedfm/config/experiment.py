"""Experiment: frozen dataclasses from one TOML file. A message on an unknown key or a wrong value names the key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fedfm.aggregation.base import Aggregator
from fedfm.attacks.attack import Attack
from fedfm.config import compatibility
from fedfm.config.faults import read_all
from fedfm.config.parts import ExperimentParts
from fedfm.config.registry import admit_named, name_of
from fedfm.config.run_spec import RunSpec
from fedfm.config.toml import build, build_named, plain, plain_or_name, read, refuse_unknown, to_toml
from fedfm.config.user_code import fill_from_trainer, is_function
from fedfm.core.capabilities import HiddenModel, Private
from fedfm.core.fields import check
from fedfm.core.method import Method
from fedfm.data.spec import IN_MEMORY, WITHHELD, DataSpec, PartitionSpec
from fedfm.data.spec import check as check_data
from fedfm.errors import Absent, Faults, InputError
from fedfm.models.adapters.adaptation import with_defaults
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.privacy.spec import PrivacySpec
from fedfm.privacy.spec import check as check_privacy

T = TypeVar("T")
_MODEL = "model.name"  # the only server-only value that is not a field of the method
_SECTIONS = ("data", "model", "method", "privacy", "attack", "aggregation", "run")
_MISSING = "[{}] is missing; an experiment has [data], [model] and [method]"


@dataclass(frozen=True, init=False)
class Experiment(ExperimentParts):
    """The settings of a run, checked, with all defaults filled in.

    The arguments have the names of the file's tables; each is a table or the object itself, e.g.
    ``method=FedAvg(rounds=3)``.

    Example:
        >>> e = Experiment(data={"name": "digits"}, model={"name": "nano-vit"}, method={"name": "fedavg"})
        >>> e.method.rounds
        10
    """

    def __init__(
        self,
        data: DataSpec | Mapping[str, Any],
        model: ModelSpec | Mapping[str, Any] | None,
        method: Method[Any] | Mapping[str, Any],
        *,
        name: str | None = None,
        privacy: PrivacySpec | Mapping[str, Any] | None = None,
        attack: Attack | Mapping[str, Any] | None = None,
        aggregation: Aggregator | Mapping[str, Any] | None = None,
        run: RunSpec | Mapping[str, Any] | None = None,
        method_name: str | None = None,
        tuning: tuple[dict[str, Any], ...] = (),
    ) -> None:
        """Build and check the settings. Only ``dataclasses.replace`` passes ``method_name``, for checked settings.

        Raises:
            InputError: a value is wrong; the message has its key, the value and what would be right.
        """
        changed = method_name is not None
        data = _section_of(DataSpec, data, "data")
        if isinstance(method, Mapping):
            method_name, method = build_named("methods", method, "method")
        if not isinstance(method, Method):
            raise InputError(
                f'method = {method!r:.80}: expected a table, e.g. {{"name": "fedavg"}}, or a Method', key="method"
            )
        if isinstance(method, HiddenModel):
            if model is not None and not changed:
                raise InputError(
                    "[model]: this method's clients have no model, and method.foundation is the server's; drop [model]",
                    key="model",
                )
            model = method.model_table()
        elif model is None:
            raise Absent(_MISSING.format("model"), key="model")
        model = _section_of(ModelSpec, model, "model")
        privacy = None if privacy is None else _section_of(PrivacySpec, privacy, "privacy")
        method = method.settle(privacy) if isinstance(method, Private) else method
        if attack is not None and not isinstance(attack, Attack):
            attack = build_named("attacks", attack, "attack")[1]
        if aggregation is None or isinstance(aggregation, Mapping):
            built: Aggregator = build_named("aggregation", aggregation or {}, "aggregation", default="mean")[1]
            aggregation = built
        if privacy is not None and privacy.aggregator == "secagg":
            from fedfm.config import guarantee

            aggregation = guarantee.hide_updates(aggregation)
        stated = isinstance(run, Mapping) and "timeout" in run
        run = _section_of(RunSpec, {} if run is None else run, "run")
        if run.extend_timeout is None:
            run = dataclasses.replace(run, extend_timeout=not stated and run.timeout == RunSpec.timeout)
        method_name = method_name or name_of("methods", method)
        if model.adaptation is not None or not (model.name == IN_MEMORY or is_function(data.name)):
            other = "full" if is_function(model.name) else method.needs.adaptation
            default = "head" if model.name == "features" else other
            adaptation = with_defaults(model.adaptation or AdaptationSpec(name=default), model.task)
            model = dataclasses.replace(model, adaptation=adaptation)
        if name is None:
            source = "silos" if data.clients else Path(data.name or data.path or data.hub or "data").name.split(".")[0]
            name = f"{method_name}-{source}"
        if not isinstance(name, str) or not name.strip() or any(c in name for c in "/\\\0") or len(name) > 200:
            raise InputError(
                f"name = {name!r:.80}: expected a text of at most 200 characters, without slashes", key="name"
            )
        given = {"name": name, "data": data, "model": model, "method": method, "method_name": method_name}
        given |= {"privacy": privacy, "attack": attack, "run": run, "aggregation": aggregation, "tuning": tuning}
        for key, value in given.items():
            object.__setattr__(self, key, value)
        if not changed:
            self._check()

    def _check(self) -> None:
        """Check the settings alone and together, and give method and aggregation the guarantee of [privacy]."""
        check_data(self.data)
        for where in ("method", "model", "run", "aggregation"):
            check(getattr(self, where), where)
        self.method.validate()
        if self.attack is not None:
            check(self.attack, "attack")
        compatibility.check_as_asked(self)
        if self.privacy is not None and self.privacy.states_epsilon:
            from fedfm.config import guarantee

            check_privacy(self.privacy)
            method, aggregation = guarantee.guarantee(self.method, self.aggregation, self.privacy)
            object.__setattr__(self, "method", method)
            object.__setattr__(self, "aggregation", aggregation)
        compatibility.check_as_run(self)
        if self.run.asynchronous is not None:
            from fedfm.config.asynchronous import asynchronous

            object.__setattr__(self, "aggregation", asynchronous(self, self.run.asynchronous))

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Mapping[str, Any] | None = None,
        *,
        tell: Callable[[str], None] | None = None,
    ) -> Experiment:
        """Read a TOML file; its paths are relative to the file's folder, or else to the working directory.

        Args:
            overrides: values by key, as ``{"method.rounds": 5}``.
            tell: receives a line for each key of the file's method that is left out, because ``overrides`` name a
                method that does not take the key. If ``tell`` is None, such a key is refused.

        Raises:
            InputError: the file is absent, not TOML, or not a valid experiment; the message has a line for each fault.
        """
        takes = "`fedfm run exp.toml` takes an experiment in TOML"
        table = read(path, overrides or {}, takes)
        if tell is not None and overrides and "method.name" in overrides:
            from fedfm.config.replaced import without_former_keys

            former = read(path, {}, takes).get("method")
            if isinstance(former, Mapping):
                table = without_former_keys(table, former, overrides, tell)
        return read_all(path, table, lambda tables: cls.from_dict(fill_from_trainer(tables), imports=True), _readers())

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], *, imports: bool = False) -> Experiment:
        """Build an experiment from nested tables, as a TOML reader returns them.

        Args:
            imports: whether classes named as ``module:Class`` or by an entry point are imported. Only for tables
                written by this process's owner: importing a module runs its code.

        Raises:
            InputError: a value is wrong; the message has its key, the value and what would be right.
        """
        _check_sections(table)
        if imports:
            admit_named(table)
        return cls(**{"model": None, **table})

    def server_only(self) -> dict[str, Any]:
        """Values that only the server may know, by key."""
        marked = [f.name for f in dataclasses.fields(self.method) if f.metadata.get("server_only")]
        model = {_MODEL: self.model.name} if self.method.needs.model == "server" else {}
        return {key: getattr(self.method, key) for key in marked} | model

    def for_clients(self) -> Experiment:
        """The experiment that clients receive: server-only values are withheld."""
        return self._with(dict.fromkeys(self.server_only(), WITHHELD))

    def for_server(self, known: Mapping[str, Any]) -> Experiment:
        """The inverse of :meth:`for_clients`, with the server's values.

        Raises:
            InputError: one of these values is missing.
        """
        missing = [key for key, value in self.server_only().items() if value == WITHHELD and key not in known]
        if missing:
            where = missing[0] if missing[0] == _MODEL else f"method.{missing[0]}"
            raise InputError(f"{where}: it is withheld from clients, and the server has no value for it", key=where)
        return self._with({key: known[key] for key in self.server_only() if key in known})

    def _with(self, values: Mapping[str, Any]) -> Experiment:
        if not values:
            return self
        fields = {key: value for key, value in values.items() if key != _MODEL}
        model = dataclasses.replace(self.model, name=values.get(_MODEL, self.model.name))
        return dataclasses.replace(self, method=dataclasses.replace(self.method, **fields), model=model)

    def to_dict(self) -> dict[str, Any]:
        """Nested tables with every default filled in; ``from_dict`` is the inverse."""
        method = {"name": self.method_name} | plain(self.method)
        model = {} if isinstance(self.method, HiddenModel) else {"model": plain(self.model)}
        tables = {"name": self.name, "data": plain(self.data), **model, "method": method}
        others = {"privacy": self.privacy, "attack": self.attack, "aggregation": self.aggregation, "run": self.run}
        return tables | {key: plain_or_name(value) for key, value in others.items() if value is not None}

    @property
    def silos_own_rows(self) -> bool:
        """Whether silos have their own rows, so that no partition assigns rows."""
        silos = self.data.clients is not None or self.data.classes is not None or self.run.engine == "folder"
        # A SuperLink's nodes without silo files share one table. An experiment that sets a partition splits this table.
        return silos or (self.run.superlink is not None and self.data.partition == PartitionSpec())

    def to_display(self) -> dict[str, Any]:
        """Like :meth:`to_dict`, but for display: the partition is left out if it splits no rows."""
        tables = self.to_dict()
        if self.silos_own_rows:
            tables["data"].pop("partition", None)
        return tables

    def to_toml(self) -> str:
        """The experiment as a TOML file with every default filled in; keys without a value are left out."""
        return to_toml(self.to_dict())


def _check_sections(table: Mapping[str, Any]) -> None:
    """Refuse unknown tables, missing tables, and values that are not tables."""
    faults = Faults()
    with faults:
        refuse_unknown(table, {"name", *_SECTIONS}, "")
    for section in ("data", "method"):
        if section not in table:
            faults.add(Absent(_MISSING.format(section), key=section))
    for section in _SECTIONS:
        if section in table and not isinstance(table[section], Mapping):
            text = f"{section} = {table[section]!r}: expected a table [{section}]"
            faults.say(text, key=section, allowed="a table")
    faults.refuse()


def _readers() -> Iterator[Callable[[Mapping[str, Any]], object]]:
    """Readers of single tables, which find faults that the reader of the complete file does not reach."""
    from fedfm.config.single_tables import check_alone

    yield _check_sections
    for section in _SECTIONS:
        yield partial(check_alone, section)


def _section_of(cls: type[T], value: T | Mapping[str, Any], section: str) -> T:
    return value if isinstance(value, cls) else build(cls, value, section)
