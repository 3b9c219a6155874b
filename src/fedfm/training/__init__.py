"""Client optimisers, one file each, and how they are computed: loops, packed cohorts, heads; distillation."""

from __future__ import annotations

from fedfm.training.optimisers import ABSENT, SGD, Adam, AdamW, Local, Proximal, TrainsLocally
from fedfm.training.personal import DittoOptimiser, DualAdapter

__all__ = [
    "ABSENT",
    "BY_NAME",
    "SGD",
    "Adam",
    "AdamW",
    "DittoOptimiser",
    "DualAdapter",
    "Local",
    "Proximal",
    "TrainsLocally",
]

BY_NAME: dict[str, type[Local]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "proximal": Proximal,
    "ditto": DittoOptimiser,
    "dual_adapter": DualAdapter,
}
