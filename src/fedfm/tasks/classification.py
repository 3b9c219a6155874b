"""Classification: each row has one of several classes; a new head predicts this class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfm.tasks._one_class import OneClassTask
from fedfm.tasks.task import LORA


@dataclass(frozen=True)
class Classification(OneClassTask):
    """The model predicts one class for an image, a text or a vector."""

    name: ClassVar[str] = "classification"
    default: ClassVar[bool] = True
    implied_by: ClassVar[tuple[str, ...]] = ("image", "text", "features")
    new_head: ClassVar[bool] = True
    adaptations: ClassVar[tuple[str, ...]] = ("full", "head", "top_layers", *LORA, "side_adapter")

    def auto_class(self, kind: str) -> str:
        return "ImageClassification" if kind == "image" else "SequenceClassification"

    def peft_type(self, kind: str) -> str | None:
        return None if kind == "image" else "SEQ_CLS"
