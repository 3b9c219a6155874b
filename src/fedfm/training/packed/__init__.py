"""Fast training of LoRA in transformer classifiers on a CPU, with hand-written forward and backward passes.

It supports float32 classifiers (BERT, ViT, DeiT and I-JEPA) without dropout that have a trained linear head and PEFT's
LoRA (also with A frozen) on any linear maps of their layers. The passes use oneDNN, without padding and autograd. The
input of the lowest adapted layer is cached, and the last layer computes only the token that the model reads. All other
models use :mod:`fedfm.training.loop`.

The kernels ``exact`` train one client at a time, so a client's result does not depend on other clients, not even in the
last bits. ``fast`` packs several clients into one batch; ``fast_bf16`` also multiplies by frozen weights in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedfm.core.rows import Rows
from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.training.local_job import Job
from fedfm.training.packed import attention, trainer
from fedfm.training.packed.net import Net, Unsupported, read
from fedfm.training.packed.predictor import CachedLogits
from fedfm.training.packed.prefix import Cache, takes

if TYPE_CHECKING:
    from fedfm.training.packed.clipped_rows import RowGradients

KERNELS = ("exact", "fast", "fast_bf16")
FAST_BF16 = "fast_bf16"
_WIDTH = 4  # clients in a packed batch: 8 clients exceed the cache; with 1, overhead costs 4 ms per step
_LONG = 64  # for images of at least this number of tokens, one client's batch already fills the cache

_known: WeakKeyDictionary[Any, dict[bool, _Found | None]] = WeakKeyDictionary()


def applies(model: Model | None, kernels: str) -> bool:
    """Whether :func:`train` supports this model; the loop trains all others."""
    return kernels in KERNELS and _net(model, kernels == FAST_BF16) is not None


def packs(model: Model | None) -> bool:
    """Whether the model is set to fast kernels that support it; they give other results than ``exact`` kernels."""
    return _fast_net(model) is not None


def width(model: Model | None) -> int:
    """Number of clients whose rows are packed into one batch."""
    found = _fast_net(model)
    return 1 if found is None or found.net.positions >= _LONG else _WIDTH


def prepare(model: Model | None) -> None:
    """Load, or compile at the first use, the attention of fast kernels."""
    found = _fast_net(model)
    if found is not None and attention.fits(found.net.width, found.net.layers[0].heads):
        from fedfm.training.packed import fused  # noqa: F401


def train(jobs: Sequence[Job]) -> list[Params]:
    """As :func:`fedfm.training.loop.train`, within rounding: 1e-5 in relative L2 norm (bfloat16: 1e-2)."""
    model = jobs[0].client.model
    kernels = getattr(model, "kernels", "exact")
    found = _net(model, kernels == FAST_BF16, fresh=True)
    if found is None:
        from fedfm.training import loop

        return loop.train(jobs)
    buffers.keep_freed()
    net, cache = found.net, found.cache
    rows = [job.client.data.train for job in jobs]
    good = [i for i, r in enumerate(rows) if takes(r) and r.labels is not None and set(jobs[i].w) == net.names]
    out = dict[int, Params]()
    if len(good) < len(jobs):
        from fedfm.training import loop

        out = {i: loop.train([job])[0] for i, job in enumerate(jobs) if i not in good}
    groups = [[i] for i in good] if kernels == "exact" else [good]
    with torch.no_grad():
        for group in filter(None, groups):
            trained = trainer.train(net, cache, [jobs[i] for i in group], fast=kernels != "exact")
            out |= zip(group, trained, strict=True)
    return [out[i] for i in range(len(jobs))]


def predict(model: Model, rows: Rows) -> Tensor | None:
    """Logits (n, C) of the model, float32 with all kernels; None if the model or the rows are not supported.

    The logits equal the module's within 1e-5. They are bit for bit the same for the same rows, order and parameters.
    Logits of the same rows and parameters are cached.
    """
    found = _net(model, False, fresh=True) if takes(rows) else None
    if found is None:
        return None
    buffers.keep_freed()
    with torch.no_grad():
        p = torch.empty(found.net.flat.size)
        trainer.fill(found.net, p, model.live())
        return found.predictor(p, rows)


def row_gradients(model: Model, rows: Rows) -> RowGradients | None:
    """Sums of clipped gradients of single rows; None if the model or the rows are not supported."""
    from fedfm.training.packed.clipped_rows import RowGradients

    if type(model).loss is not Model.loss or not len(rows) or rows.labels is None or not takes(rows):
        return None
    kernels, found = getattr(model, "kernels", "exact"), _net(model, False, fresh=True)
    if found is None:
        return None
    buffers.keep_freed()
    with torch.no_grad():
        return RowGradients(model, found.net, found.cache, rows, fast=kernels != "exact")


class _Found(NamedTuple):
    net: Net
    cache: Cache  # the prepared training rows
    predictor: CachedLogits


def _net(model: Model | None, low: bool, *, fresh: bool = False) -> _Found | None:
    """The model's net, read once; None if unsupported. ``fresh``: read it again if frozen weights have changed."""
    if (
        model is None
        or not hasattr(getattr(model, "module", None), "peft_config")
        or not getattr(model, "softmax", True)
        or getattr(model, "weights_overridden", 0) > 0
        or getattr(model, "hollow", False)
    ):
        return None
    known = _known.setdefault(model, {})
    found = known.get(low)
    if low not in known or (fresh and found is not None and found.net.stale()):
        with torch.no_grad():
            try:
                net = read(model, low=low)
                known[low] = _Found(net, Cache(), CachedLogits(net))
            except Unsupported:
                known[low] = None
    return known[low]


def _fast_net(model: Model | None) -> _Found | None:
    kernels = getattr(model, "kernels", "exact")
    return None if kernels == "exact" else _net(model, kernels == FAST_BF16)
