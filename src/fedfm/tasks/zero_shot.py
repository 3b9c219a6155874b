"""Zero-shot classification: a model of two encoders compares pictures with the names of the classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfm.tasks.task import LORA, Task


@dataclass(frozen=True)
class ZeroShotTask(Task):
    """A picture -> the class whose name fits best; nothing is new in the model."""

    name: ClassVar[str] = "zero_shot"
    kinds: ClassVar[tuple[str, ...]] = ("image",)
    needs_classes: ClassVar[bool] = True
    one_class_a_row: ClassVar[bool] = True
    linear_head: ClassVar[bool] = True
    two_encoders: ClassVar[bool] = True
    scores_unseen_classes: ClassVar[bool] = True
    compared_by_row: ClassVar[bool] = True
    no_pretraining: ClassVar[str] = "expected classification, language_modelling or instruction"
    adaptations: ClassVar[tuple[str, ...]] = ("full", "head", "top_layers", *LORA, "prompt")
    lora_scale: ClassVar[float] = 1.0
