"""The settings of `fedfm distil`: the tables of its TOML file."""

from __future__ import annotations

from dataclasses import dataclass

from fedfm.api.central_spec import CentralTraining
from fedfm.core import tasks
from fedfm.core.fields import setting
from fedfm.encrypted.student.distillation_loss import Recipe
from fedfm.encrypted.student.neuron_polynomials import MARGIN
from fedfm.errors import InputError
from fedfm.models.spec import ModelSpec


@dataclass(frozen=True)
class DistilSpec(Recipe):
    """The settings in the table [distil]."""

    image_size: int | None = setting(
        None,
        "side of the student's images in pixels; positions are interpolated [the size of the model's images]",
        ge=1,
    )
    class_token: bool = setting(
        True, "whether the student of a ViT keeps its class token; without it, the head reads the mean of the patches"
    )
    views: int = setting(
        1,
        "for images: epochs alternate between the unchanged images and views - 1 sets of random crops",
        ge=1,
    )
    bfloat16: bool = setting(
        False,
        "whether to train with products in bfloat16, which takes half the time on processors with bfloat16; intervals "
        "are measured in full precision",
    )
    direct: bool = setting(
        False,
        "whether to convert without training: by least squares, block by block, with a polynomial of degree 8 for each "
        "neuron; for a ViT or a BERT, with epochs = [0, 0, 0]",
    )
    drawn: int = setting(
        0, "for images: number of pictures by formula that intervals are measured on, too; no file is needed", ge=0
    )
    margin: float = setting(
        MARGIN,
        "with direct: factor by which measured intervals are widened; a larger one holds on more kinds of rows, and "
        "costs accuracy and depth",
        ge=1,
        finite=True,
    )
    seed: int = setting(0, "seed for the split and the order of rows", ge=0)
    threads: int = setting(
        0, "number of CPU threads, 0 for one per core; another number of threads may change the last bits", ge=0
    )


@dataclass(frozen=True)
class Distillation(CentralTraining[DistilSpec]):
    """The complete settings of a distillation, with all defaults filled in: [data], [model], [distil].

    Example:
        >>> d = Distillation.from_dict({
        ...     "data": {"name": "digits"}, "model": {"name": "nano-vit"}, "distil": {"epochs": [1, 2, 2]}})
        >>> d.spec.epochs, d.spec.polynomials
        ((1, 2, 2), 'scaled')
    """

    section = "distil"
    noun = "distillation"
    settings = DistilSpec

    @classmethod
    def refuse(cls, model: ModelSpec, spec: DistilSpec) -> None:
        """Raise an InputError for an odd degree, or for a model that cannot be distilled."""
        spec.validate()
        if spec.direct and (any(spec.epochs) or spec.views > 1 or spec.polynomials != "scaled"):
            raise InputError(
                "distil.direct = true trains nothing and has its own polynomials; set distil.epochs = [0, 0, 0], and "
                "drop distil.views and distil.polynomials",
                key="distil.direct",
            )
        if spec.margin != MARGIN and not spec.direct:
            raise InputError(f"distil.margin = {spec.margin}: only distil.direct = true has it", key="distil.margin")
        if model.weights != "pretrained":
            raise InputError(
                'model.weights = "random": an untrained model has no knowledge to distil', key="model.weights"
            )
        if (task := tasks.task_named(model.task)) is not None and not task.classifies_by_head:
            raise InputError(
                f'model.task = "{model.task}": expected classification, whose models read all tokens', key="model.task"
            )
