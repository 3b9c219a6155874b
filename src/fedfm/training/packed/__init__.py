"""LoRA of transformer classifiers, forward and backward by hand: the fast way to train clients on a CPU.

Supported: BERT, ViT, DeiT and I-JEPA classifiers with PEFT's LoRA (also with A frozen) on any linear maps of their
layers and a trained linear head, float32, without dropout. What makes it fast: no padding between tokens, oneDNN,
no autograd, nothing computed below the lowest adapted layer after the first visit, and of the last layer only the token
that the model reads. Everything else goes through :mod:`fedfm.training.loop`.

Kernels ``exact`` train one client at a time: its bits depend on nothing else. ``fast`` packs several clients into one
batch, ``fast_bf16`` also multiplies by frozen weights in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedfm.core.rows import Rows
from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Params
from fedfm.models.model import PREDICTORS, Model
from fedfm.training import loop
from fedfm.training.job import Job
from fedfm.training.packed import attention, trainer
from fedfm.training.packed.net import Net, Unsupported, read
from fedfm.training.packed.predictor import Predictor
from fedfm.training.packed.prefix import Cache, takes

KERNELS = ("exact", "fast", "fast_bf16")
FAST_BF16 = "fast_bf16"
_WIDTH = 4  # clients a packed batch: 8 leave the cache, one alone pays 4 ms a step between the kernels
_LONG = 64  # tokens a picture from which one client's batch fills the cache

_known: WeakKeyDictionary[Any, dict[bool, _Found | None]] = WeakKeyDictionary()


def applies(model: Model, kernels: str) -> bool:
    """Whether :func:`train` computes this model by hand; otherwise it is left to the loop."""
    return kernels in KERNELS and _net(model, kernels == FAST_BF16) is not None


def width(model: Model) -> int:
    """How many clients one chunk should hold."""
    kernels = getattr(model, "kernels", "exact")
    found = _net(model, kernels == FAST_BF16) if kernels != "exact" else None
    return 1 if found is None or found.net.positions >= _LONG else _WIDTH


def prepare(model: Model) -> None:
    """Load, or compile where that has never been done, what fast kernels attend with."""
    kernels = getattr(model, "kernels", "exact")
    found = _net(model, kernels == FAST_BF16) if kernels != "exact" else None
    if found is not None and attention.fits(found.net.width, found.net.layers[0].heads):
        from fedfm.training.packed import fused  # noqa: F401


def train(jobs: Sequence[Job]) -> list[Params]:
    """As :func:`fedfm.training.loop.train`, within rounding: 1e-5 in relative L2 norm (bfloat16: 1e-2)."""
    model = jobs[0].client.model
    kernels = getattr(model, "kernels", "exact")
    found = _net(model, kernels == FAST_BF16, fresh=True)
    if found is None:
        return loop.train(jobs)
    buffers.keep_freed()
    net, cache = found.net, found.cache
    good = [
        takes(job.client.data.train) and job.client.data.train.labels is not None and set(job.w) == net.names
        for job in jobs
    ]
    groups = [[i] for i in range(len(jobs))] if kernels == "exact" else [[i for i, fine in enumerate(good) if fine]]
    out: list[Any] = [None] * len(jobs)
    with torch.no_grad():
        for group in groups:
            group = [i for i in group if good[i]]
            if group:
                trained = trainer.train(net, cache, [jobs[i] for i in group], fast=kernels != "exact")
                for i, w in zip(group, trained, strict=True):
                    out[i] = w
    for i, fine in enumerate(good):
        if not fine:
            out[i] = loop.train([jobs[i]])[0]
    return out


def predict(model: Model, rows: Rows) -> Tensor | None:
    """Logits (n, C) of the model as it stands, float32 whatever the kernels; None where they are not computed by hand.

    They equal the module's within 1e-5. Their bits depend on the rows, their order and the parameters alone. What was
    computed for the same rows with the same parameters is not computed again.
    """
    found = _net(model, False, fresh=True) if takes(rows) else None
    if found is None:
        return None
    buffers.keep_freed()
    with torch.no_grad():
        p = torch.empty(found.net.flat.size)
        trainer.fill(found.net, p, model.live())
        return found.predictor(p, rows)


class _Found(NamedTuple):
    net: Net
    cache: Cache  # of training rows
    predictor: Predictor


def _net(model: Model, low: bool, *, fresh: bool = False) -> _Found | None:
    """The model as read once; with ``fresh``, read again if its frozen weights have changed since."""
    if not hasattr(getattr(model, "module", None), "peft_config") or not getattr(model, "softmax", True):
        return None
    if getattr(model, "weights_overridden", 0):
        return None
    known = _known.setdefault(model, {})
    found = known.get(low)
    if low not in known or (fresh and found is not None and found.net.stale()):
        with torch.no_grad():
            try:
                net = read(model, low=low)
                known[low] = _Found(net, Cache(), Predictor(net))
            except Unsupported:
                known[low] = None
    return known[low]


PREDICTORS.append(predict)
