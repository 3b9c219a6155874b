"""Settings of `fedfm distil`: the tables of its file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfm.api.pretrain_spec import alone, check_central
from fedfm.config.faults import read_all
from fedfm.config.toml import build, plain, read, refuse_unknown
from fedfm.core import tasks
from fedfm.core.fields import check, setting
from fedfm.data.spec import DataSpec
from fedfm.encrypted.student.distillation_loss import Recipe
from fedfm.errors import InputError
from fedfm.models.spec import AdaptationSpec, ModelSpec


@dataclass(frozen=True)
class DistilSpec(Recipe):
    """The [distil] table."""

    image_size: int | None = setting(
        None, "side of the twin's pictures in pixels; positions are interpolated [the model's]", ge=1
    )
    class_token: bool = setting(
        True, "false: a twin of a ViT without its class token, whose head reads the mean over the patches"
    )
    views: int = setting(
        1, "pictures: the epochs take turns at the pictures and so many less one sets of random crops of them", ge=1
    )
    bfloat16: bool = setting(
        False, "multiply in bfloat16 in training: half the time on processors that can; the intervals are exact"
    )
    seed: int = setting(0, "seed of the split and the order of rows", ge=0)
    threads: int = setting(0, "CPU threads; 0: one per core; another number may change the last bits", ge=0)


@dataclass(frozen=True)
class Distillation:
    """Everything that defines a distillation, with every default filled in: [data], [model], [distil].

    Example:
        >>> d = Distillation.from_dict({
        ...     "data": {"name": "digits"}, "model": {"name": "nano-vit"}, "distil": {"epochs": [1, 2, 2]}})
        >>> d.spec.epochs, d.spec.polynomials
        ((1, 2, 2), 'scaled')
    """

    data: DataSpec
    model: ModelSpec
    spec: DistilSpec

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Distillation:
        """Read a TOML file.

        Raises:
            InputError: as :meth:`from_dict`, with the file's name.
        """
        table = read(path, overrides or {}, "`fedfm distil twin.toml` takes [data], [model] and [distil] in TOML")
        return read_all(path, table, cls.from_dict, alone(DistilSpec, "distil"))

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> Distillation:
        """Build from nested tables as TOML gives them.

        Raises:
            InputError: with the key, what it is, and what would be right.
        """
        refuse_unknown(table, {"data", "model", "distil"}, "")
        for section in ("data", "model"):
            if section not in table:
                raise InputError(
                    f"[{section}] is missing; a distillation has [data], [model] and [distil]", key=section
                )
        data = build(DataSpec, table["data"], "data")
        model = build(ModelSpec, table["model"], "model")
        spec = build(DistilSpec, table.get("distil", {}), "distil")
        check_central(data, model, "distillation")
        check(spec, "distil")
        spec.validate()
        if model.weights != "pretrained":
            raise InputError(
                'model.weights = "random": a model without training has nothing to distil', key="model.weights"
            )
        if (task := tasks.task_named(model.task)) is not None and not task.classifies_by_head:
            raise InputError(
                f'model.task = "{model.task}": expected classification, whose models read all tokens', key="model.task"
            )
        return cls(data, dataclasses.replace(model, adaptation=AdaptationSpec("full")), spec)

    def to_dict(self) -> dict[str, Any]:
        """Nested tables; ``from_dict`` is the inverse."""
        return {"data": plain(self.data), "model": plain(self.model), "distil": plain(self.spec)}
