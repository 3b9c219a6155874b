"""Zero-shot classification: a model of two encoders compares images with the names of the classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedfm.core.fields import setting
from fedfm.tasks._one_class import OneClassTask
from fedfm.tasks.task import LORA

if TYPE_CHECKING:
    from torch import Tensor

_CONTRASTIVE = "contrastive"


@dataclass(frozen=True)
class ZeroShotTask(OneClassTask):
    """The model predicts the class whose name fits an image best; the model gets no new weights."""

    name: ClassVar[str] = "zero_shot"
    kinds: ClassVar[tuple[str, ...]] = ("image",)
    softmax: ClassVar[bool] = True
    two_encoders: ClassVar[bool] = True
    no_pretraining: ClassVar[str] = "expected classification, language_modelling or instruction"
    adaptations: ClassVar[tuple[str, ...]] = ("full", "head", "top_layers", *LORA, "prompt")
    lora_scale: ClassVar[float] = 1.0

    templates: tuple[str, ...] = setting(
        ("a photo of a {}.",),
        "zero_shot: prompts with {} for the class name; the features of several prompts are averaged",
        pattern=r"[^{}]*\{\}[^{}]*",
        least=1,
        most=512,
        words="at most 512 texts with one {} for the class name",
    )
    base_classes: int | None = setting(
        None,
        "zero_shot: number of classes with training rows, the first in order; the others are new, with only test rows",
        ge=1,
    )
    loss_: str = setting(
        "cross_entropy",
        "zero_shot: cross_entropy over the class names, or contrastive: CLIP's symmetric loss of a batch",
        choices=("cross_entropy", _CONTRASTIVE),
    )

    @property
    def class_templates(self) -> tuple[str, ...]:
        return self.templates

    @property
    def trained_classes(self) -> int | None:
        return self.base_classes

    @property
    def mixes_rows(self) -> str:
        plain = self.loss_ != _CONTRASTIVE
        return "" if plain else "a contrastive loss compares the rows of a batch with each other"

    def check_single_encoder(self) -> None:
        if self.mixes_rows:
            from fedfm.errors import InputError

            raise InputError(
                'model.loss = "contrastive" compares images with texts: it needs model.task = "zero_shot" and an '
                'adaptation that keeps both encoders, such as "lora"',
                key="model.loss",
            )

    def objective(self, logits: Tensor, targets: Tensor) -> Tensor:
        return contrastive(logits, targets) if self.mixes_rows else super().objective(logits, targets)


def contrastive(logits: Tensor, labels: Tensor) -> Tensor:
    """CLIP's loss of a batch (Radford et al., Figure 3): each image is classified among the batch's texts, and each
    text among the batch's images. Images of one class share a text, so the targets are uniform over equal labels.

    Args:
        logits: (b, C), the scaled similarities s <V, T> of the images and the texts of all classes.
        labels: (b,).
    """
    import torch.nn.functional as F

    pairs = logits[:, labels]  # (b, b)
    same = (labels[:, None] == labels).to(pairs.dtype)
    targets = same / same.sum(1, keepdim=True)
    return (F.cross_entropy(pairs, targets) + F.cross_entropy(pairs.T, targets)) / 2
