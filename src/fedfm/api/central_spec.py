"""The settings of central training, `fedfm pretrain` and `fedfm distil`: [data], [model] and one more table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from fedfm.config.faults import read_all
from fedfm.config.toml import build, plain, read, refuse_unknown
from fedfm.core.fields import check
from fedfm.data.spec import IN_MEMORY, DataSpec, PartitionSpec
from fedfm.data.spec import check as check_data
from fedfm.errors import InputError
from fedfm.models.spec import AdaptationSpec, ModelSpec

S = TypeVar("S")


@dataclass(frozen=True)
class CentralTraining(Generic[S]):
    """The complete settings of a central training, with all defaults filled in.

    Attributes:
        section: name of the training's own table, and of its command.
        noun: name of the training in messages and in the folder's state.
        settings: class of the training's own table.
    """

    section: ClassVar[str]
    noun: ClassVar[str]
    settings: ClassVar[type]

    data: DataSpec
    model: ModelSpec
    spec: S

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Self:
        """Read a TOML file.

        Raises:
            InputError: as :meth:`from_dict`; the error also has the file's name.
        """
        takes = f"`fedfm {cls.section} exp.toml` takes [data], [model] and [{cls.section}] in TOML"
        table = read(path, overrides or {}, takes)
        return read_all(path, table, cls.from_dict, _alone(cls.settings, cls.section))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Self:
        """Build the settings from nested tables, as a TOML reader returns them.

        Raises:
            InputError: the tables are invalid; the error names the key, its value, and a valid value.
        """
        refuse_unknown(table, {"data", "model", cls.section}, "")
        for section in ("data", "model"):
            if section not in table:
                raise InputError(
                    f"[{section}] is missing; a {cls.noun} has [data], [model] and [{cls.section}]", key=section
                )
        data = build(DataSpec, table["data"], "data")
        model = build(ModelSpec, table["model"], "model")
        spec = build(cls.settings, table.get(cls.section, {}), cls.section)
        _check_central(data, model, cls.noun)
        check(spec, cls.section)
        cls.refuse(model, spec)
        return cls(data, dataclasses.replace(model, adaptation=AdaptationSpec("full")), spec)

    @classmethod
    def refuse(cls, model: ModelSpec, spec: S) -> None:
        """Raise an InputError for settings that cannot be combined in this training."""

    def to_dict(self) -> dict[str, Any]:
        """The settings as nested tables; ``from_dict`` is the inverse."""
        return {"data": plain(self.data), "model": plain(self.model), self.section: plain(self.spec)}


def _alone(cls: type, section: str) -> tuple[Callable[[Mapping[str, Any]], None], ...]:
    """Functions that each check one table of a central training; ``cls`` is the class of the table ``section``."""

    def tables(found: Mapping[str, Any]) -> None:
        refuse_unknown(found, {"data", "model", section}, "")

    def check_one(name: str, kind: type, found: Mapping[str, Any]) -> None:
        if name in found:
            spec = build(kind, found[name], name)
            if isinstance(spec, DataSpec):
                check_data(spec)
            else:
                check(spec, name)

    kinds = {"data": DataSpec, "model": ModelSpec, section: cls}
    return tables, *(partial(check_one, name, kind) for name, kind in kinds.items())


def _check_central(data: DataSpec, model: ModelSpec, noun: str) -> None:
    """Check the tables [data] and [model] of a central training; messages call the training ``noun``.

    Raises:
        InputError: a value is out of bounds, or a key is only for experiments with clients.
    """
    check_data(data)
    check(model, "model")
    for key, default in (("partition", PartitionSpec()), ("val_fraction", 0.0)):
        if getattr(data, key) != default:
            raise InputError(f"data.{key}: {noun} uses all rows in one place; drop this key", key=f"data.{key}")
    if data.augment:
        raise InputError(f"data.augment: {noun} does not take it; drop it", key="data.augment")
    if IN_MEMORY in (model.name, data.name):
        raise InputError(
            f'"{IN_MEMORY}": {noun} reads its rows and makes its model itself; expected names or paths', key="data.name"
        )
    if model.adaptation is not None and model.adaptation.name != "full":
        raise InputError(
            f'model.adaptation.name = "{model.adaptation.name}": {noun} trains all parameters; drop it',
            key="model.adaptation.name",
        )
