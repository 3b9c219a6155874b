"""Settings of `fedfm pretrain`: the tables of its file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedfm.config.faults import read_all
from fedfm.config.toml import build, plain, read, refuse_unknown
from fedfm.core import tasks
from fedfm.core.fields import check, setting
from fedfm.data.spec import IN_MEMORY, DataSpec, PartitionSpec
from fedfm.data.spec import check as check_data
from fedfm.errors import InputError
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import SGD, Local, Proximal


@dataclass(frozen=True)
class PretrainSpec:
    """The [pretrain] table."""

    local: Local = setting(SGD(), "optimiser, as [method.local]: epochs, learning_rate, ...")
    milestones: tuple[int, ...] = setting((), "epochs after which the learning rate is multiplied by factor")
    factor: float = setting(0.1, "factor of the learning rate at a milestone", gt=0, le=1)
    vocabulary_size: int | None = setting(
        None, "language models: train a vocabulary of this many tokens on the training text"
    )
    vocabulary: str = setting("bpe", "bpe (on bytes) or words (between blanks)")
    seed: int = setting(0, "seed of the initial weights, the split and the order of rows", ge=0)
    threads: int = setting(0, "CPU threads; 0: one per core; another number may change the last bits", ge=0)


@dataclass(frozen=True)
class Pretraining:
    """Everything that defines a pretraining, with every default filled in: [data], [model], [pretrain].

    Example:
        >>> p = Pretraining.from_dict({
        ...     "data": {"name": "digits"},
        ...     "model": {"name": "preact-resnet-small", "weights": "random"},
        ...     "pretrain": {"local": {"epochs": 3}}})
        >>> p.spec.local.epochs, p.model.adaptation.name
        (3, 'full')
    """

    data: DataSpec
    model: ModelSpec
    spec: PretrainSpec

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Pretraining:
        """Read a TOML file.

        Raises:
            InputError: as :meth:`from_dict`, with the file's name.
        """
        table = read(path, overrides or {}, "`fedfm pretrain exp.toml` takes [data], [model] and [pretrain] in TOML")
        return read_all(path, table, cls.from_dict, alone(PretrainSpec, "pretrain"))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Pretraining:
        """Build from nested tables as TOML gives them.

        Raises:
            InputError: with the key, what it is, and what would be right.
        """
        refuse_unknown(table, {"data", "model", "pretrain"}, "")
        for section in ("data", "model"):
            if section not in table:
                raise InputError(
                    f"[{section}] is missing; a pretraining has [data], [model] and [pretrain]", key=section
                )
        data = build(DataSpec, table["data"], "data")
        model = build(ModelSpec, table["model"], "model")
        spec = build(PretrainSpec, table.get("pretrain", {}), "pretrain")
        check_central(data, model, "pretraining")
        check(spec, "pretrain")
        if (task := tasks.task_named(model.task)) is not None and task.no_pretraining:
            raise InputError(f'model.task = "{task.name}": {task.no_pretraining}', key="model.task")
        if isinstance(spec.local, Proximal) or spec.local.absent != "keep":
            raise InputError(
                'pretrain.local: expected name = "sgd", "adam" or "adamw", every class present', key="pretrain.local"
            )
        after = list(spec.milestones)
        if after != sorted(set(after)) or any(not 0 < e < spec.local.epochs for e in after):
            raise InputError(
                f"pretrain.milestones = {after}: expected ascending numbers of epochs between 0 and "
                f"{spec.local.epochs}",
                key="pretrain.milestones",
            )
        if spec.vocabulary_size is not None and model.weights != "random":
            raise InputError(
                'pretrain.vocabulary_size: a new vocabulary fits no weights: set model.weights = "random"',
                key="pretrain.vocabulary_size",
            )
        return cls(data, dataclasses.replace(model, adaptation=AdaptationSpec("full")), spec)

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch (1, 2, ...)."""
        local = self.spec.local
        return local.learning_rate * self.spec.factor ** sum(epoch > after for after in self.spec.milestones)

    def to_dict(self) -> dict[str, Any]:
        """Nested tables; ``from_dict`` is the inverse."""
        return {"data": plain(self.data), "model": plain(self.model), "pretrain": plain(self.spec)}


def alone(cls: type, section: str) -> tuple[Callable[[Mapping[str, Any]], None], ...]:
    """Readers of the single tables of a training in one place, whose own table has the class ``cls``."""

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


def check_central(data: DataSpec, model: ModelSpec, noun: str) -> None:
    """Check the tables of a training in one place, which the messages call ``noun``.

    Raises:
        InputError: a value is out of bounds, or only experiments with clients know the key.
    """
    check_data(data)
    check(model, "model")
    for key, default in (("partition", PartitionSpec()), ("val_fraction", 0.0)):
        if getattr(data, key) != default:
            raise InputError(
                f"data.{key}: {noun} has all rows in one place and chooses nothing; drop it", key=f"data.{key}"
            )
    if data.augment:
        raise InputError(f"data.augment: {noun} does not take it; drop it", key="data.augment")
    if IN_MEMORY in (model.name, data.name):
        raise InputError(
            f'"{IN_MEMORY}": {noun} reads its rows and makes its model; expected names or paths', key="data.name"
        )
    if model.adaptation is not None and model.adaptation.name != "full":
        raise InputError(
            f'model.adaptation.name = "{model.adaptation.name}": {noun} trains all parameters; drop it',
            key="model.adaptation.name",
        )
