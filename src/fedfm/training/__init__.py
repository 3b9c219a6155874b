"""Client optimisers, and the trainers that run them: by autograd, in packed batches, or on cached features."""

from __future__ import annotations

from fedfm.training.optimisers import ABSENT, SGD, Adam, AdamW, Local, Proximal, TrainsLocally

__all__ = [
    "ABSENT",
    "BY_NAME",
    "SGD",
    "Adam",
    "AdamW",
    "Local",
    "Proximal",
    "TrainsLocally",
]

BY_NAME = {  # name -> module and class
    "sgd": "fedfm.training.optimisers:SGD",
    "adam": "fedfm.training.optimisers:Adam",
    "adamw": "fedfm.training.optimisers:AdamW",
    "proximal": "fedfm.training.optimisers:Proximal",
    "ditto": "fedfm.training.personal:DittoOptimiser",
    "dual_adapter": "fedfm.training.personal:DualAdapter",
}
