"""The [model] table of an experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AdaptationSpec:
    """What of the model is trainable."""

    name: str = field(default="lora", metadata={"help": "full, head, top_layers, lora or ffa_lora"})
    rank: int = field(default=8, metadata={"help": "lora: rank r"})
    alpha: float | None = field(default=None, metadata={"help": "lora: scale is alpha / rank [2 rank]"})
    dropout: float = field(
        default=0.0, metadata={"help": "lora: on the adapter's input; the model's own dropout is off"}
    )
    targets: tuple[str, ...] | None = field(default=None, metadata={"help": "lora: module names [queries and values]"})
    layers: int | None = field(default=None, metadata={"help": "top_layers: how many; lora: only in the last so many"})


@dataclass(frozen=True)
class ModelSpec:
    """Which foundation model, for which task, and what of it is trainable."""

    name: str = field(
        default="", metadata={"help": 'built in ("nano-vit"; `fedfm list models`), a folder, a hub id, or "features"'}
    )
    weights: str = field(default="pretrained", metadata={"help": "pretrained or random"})
    options: dict[str, Any] | None = field(
        default=None, metadata={"help": "random weights: keys of config.json to change, e.g. { num_hidden_layers = 2 }"}
    )
    task: str | None = field(
        default=None,
        metadata={"help": "classification, zero_shot, language_modelling, instruction [what the data imply]"},
    )
    adaptation: AdaptationSpec | None = field(
        default=None,
        metadata={"help": "what of it is trained; its own dropout is off in training [lora; head for features]"},
    )
    max_length: int = field(default=128, metadata={"help": "tokens"})
    answer_tokens: int | None = field(
        default=None,
        metadata={
            "help": "instruction: most tokens of an answer [max_length, at most half of the model's positions]; "
            "0: none is generated, test rows give the loss alone"
        },
    )
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda, mps"})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16, float16: of the frozen weights"})
