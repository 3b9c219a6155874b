"""A method's requirements on the experiment, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Needs:
    """A method's requirements on the experiment.

    Attributes:
        adaptation, adaptations: the default adaptation, and the supported ones; if these are empty, all are supported.
        ranks: LoRA ranks that the method assigns to clients; the model's own rank must be at least the largest of them.
        pooled: whether the method trains on the pooled rows of all clients; only the local engine supports this.
        model: who has the experiment's model. If only the server has it, clients get raw rows and send no scores.
        local: the setting that requires all parties in one process, on the local engine; empty if none does.
        tasks: names of the supported tasks; if empty, all are supported.
        one_class: whether each row must have one class, e.g. because the method fits a distribution to each class.
        row_targets: whether each row must have a vector of targets, to which the method fits a linear head.
        bias: whether the method needs a head with a bias. If the adaptation is "head", a missing bias is added as 0.
        because: the setting that causes these needs; if empty, the method itself does.
    """

    adaptation: str = "lora"
    adaptations: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    pooled: bool = False
    model: Literal["everybody", "server"] = "everybody"
    local: str = ""
    tasks: tuple[str, ...] = ()
    one_class: bool = False
    row_targets: bool = False
    bias: bool = False
    because: str = ""
