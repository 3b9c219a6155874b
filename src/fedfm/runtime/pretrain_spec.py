"""What `fedfm pretrain` is asked for: the tables of its file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfm.config.toml import build, plain, read, refuse_unknown
from fedfm.data.spec import IN_MEMORY, DataSpec, PartitionSpec
from fedfm.errors import InputError
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training import SGD, Local, Proximal


@dataclass(frozen=True)
class PretrainSpec:
    """The [pretrain] table."""

    local: Local = field(default=SGD(), metadata={"help": "optimiser, as [method.local]: epochs, learning_rate, ..."})
    milestones: tuple[int, ...] = field(
        default=(), metadata={"help": "epochs after which the learning rate is multiplied by factor"}
    )
    factor: float = field(default=0.1, metadata={"help": "of the learning rate at a milestone"})
    vocabulary_size: int | None = field(
        default=None, metadata={"help": "language models: make a vocabulary of so many tokens from the training text"}
    )
    vocabulary: str = field(default="bpe", metadata={"help": "bpe (on bytes) or words (between blanks)"})
    seed: int = field(default=0, metadata={"help": "of the first weights, the split and the order of rows"})
    threads: int = field(default=0, metadata={"help": "0: one a core; another number may change the last bits"})


@dataclass(frozen=True)
class Pretraining:
    """What a pretraining is, with every default filled in: [data], [model], [pretrain].

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
        try:
            return cls.from_dict(table)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Pretraining:
        """Build from nested tables as TOML gives them.

        Raises:
            InputError: with the key, what it is, and what would be right.
        """
        refuse_unknown(table, {"data", "model", "pretrain"}, "")
        for section in ("data", "model"):
            if section not in table:
                raise InputError(f"[{section}] is missing; a pretraining has [data], [model] and [pretrain]")
        data = build(DataSpec, table["data"], "data")
        model = build(ModelSpec, table["model"], "model")
        made = cls(data, model, build(PretrainSpec, table.get("pretrain", {}), "pretrain"))
        made._validate()
        return dataclasses.replace(made, model=dataclasses.replace(model, adaptation=AdaptationSpec("full")))

    def _validate(self) -> None:
        for key, default in (("partition", PartitionSpec()), ("val_fraction", 0.0)):
            if getattr(self.data, key) != default:
                raise InputError(f"data.{key}: pretraining has all rows in one place and chooses nothing; drop it")
        if not self.model.name or IN_MEMORY in (self.model.name, self.data.name):
            raise InputError(
                "model.name is missing: expected a built-in name (`fedfm list models`), a folder, a hub id"
            )
        if self.model.adaptation is not None and self.model.adaptation.name != "full":
            raise InputError(
                f'model.adaptation.name = "{self.model.adaptation.name}": pretraining trains all parameters; drop it'
            )
        if self.model.task == "zero_shot":
            raise InputError('model.task = "zero_shot": expected classification, language_modelling or instruction')
        spec = self.spec
        spec.local.validate("pretrain.local")
        if isinstance(spec.local, Proximal) or spec.local.absent != "keep":
            raise InputError('pretrain.local: expected name = "sgd", "adam" or "adamw", every class present')
        after = list(spec.milestones)
        if after != sorted(set(after)) or any(not 0 < e < spec.local.epochs for e in after):
            raise InputError(
                f"pretrain.milestones = {after}: expected ascending numbers of epochs between 0 and {spec.local.epochs}"
            )
        if not 0 < spec.factor <= 1:
            raise InputError(f"pretrain.factor = {spec.factor}: expected a number in (0, 1]")
        for key in ("seed", "threads"):
            if getattr(spec, key) < 0:
                raise InputError(f"pretrain.{key} = {getattr(spec, key)}: expected a whole number of at least 0")
        if spec.vocabulary_size is not None and self.model.weights != "random":
            raise InputError('pretrain.vocabulary_size: a new vocabulary fits no weights: set model.weights = "random"')

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch (1, 2, ...)."""
        local = self.spec.local
        return local.learning_rate * self.spec.factor ** sum(epoch > after for after in self.spec.milestones)

    def to_dict(self) -> dict[str, Any]:
        """Nested tables; ``from_dict`` takes them back."""
        return {"data": plain(self.data), "model": plain(self.model), "pretrain": plain(self.spec)}
