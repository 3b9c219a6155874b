"""A method's requirements on the experiment, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Needs:
    """A method's requirements on the experiment.

    Attributes:
        adaptation, adaptations: the default adaptation, and the supported ones; empty: all.
        ranks: LoRA ranks that it assigns to clients; the model's own rank must be at least the largest of them.
        pooled: whether it trains on the pooled rows of all clients; only the local engine supports this.
        model: who has the experiment's model. With "server" clients get unprepared rows, and send no scores.
        local: the setting that requires all parties in one process, on the local engine; empty: none.
        tasks: names of the supported tasks; empty: all.
        one_class: whether it needs rows of one class each, such as a method that fits a distribution to each class.
        bias: whether it fits a linear head with a bias. With adaptation "head" a head without a bias gets a zero bias.
        because: the setting that causes these needs; empty: the method itself.
    """

    adaptation: str = "lora"
    adaptations: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    pooled: bool = False
    model: Literal["everybody", "server"] = "everybody"
    local: str = ""
    tasks: tuple[str, ...] = ()
    one_class: bool = False
    bias: bool = False
    because: str = ""
