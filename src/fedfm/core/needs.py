"""What a method requires of the experiment, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Needs:
    """What a method requires of the experiment.

    Attributes:
        adaptation, adaptations: the default, and those that it supports; empty: all.
        ranks: LoRA ranks that it assigns to clients; the model's own rank must be at least the largest.
        pooled: it trains on all rows in one place; only the local engine supports this.
        model: who has the experiment's model. With "server" clients get rows as they were read, and send no scores.
        local: the setting because of which all parties are in one place, on the local engine; empty: none.
        tasks: names of those that it supports; empty: all.
        bias: it fits a linear head with a bias; with adaptation "head" a head that has none gets one of zeros.
        because: the setting that causes these needs; empty: the method.
    """

    adaptation: str = "lora"
    adaptations: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    pooled: bool = False
    model: Literal["everybody", "server"] = "everybody"
    local: str = ""
    tasks: tuple[str, ...] = ()
    bias: bool = False
    because: str = ""
