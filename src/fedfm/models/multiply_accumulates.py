"""Multiply-accumulates (MACs) of the clients' training, after FedBaF's Appendix B (arXiv:2410.18352).

TMAC = T E m n MACs. T is the number of rounds to a target accuracy, E the number of epochs, m the number of clients per
round, and n the median number of training samples of a client. MACs is the count for one sample's forward pass. In the
paper, MACS_k already covers all of a client's data, and is multiplied by n once more; here a sample counts once. As in
the paper's figures, the backward pass (about twice the forward pass) is not counted: ratios between runs do not depend
on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fedfm.core.rows import Batch, Rows
from fedfm.models.model import Model
from fedfm.models.model_kinds import is_dual_model

_LOOK = 64  # number of rows whose median length represents all rows


@dataclass(frozen=True)
class Macs:
    """MACs of one sample's forward pass.

    Attributes:
        training: MACs that are computed again in each epoch.
        once: MACs of a frozen backbone whose features are computed once (adaptation head); 0 for others.
    """

    training: int
    once: int


def per_sample(model: Model, rows: Rows, batch_size: int = 1) -> Macs | None:
    """MACs of one row's forward pass: matrix products, convolutions and attention. None if there are no rows.

    For texts, the row of median length among the first 64 is counted. All layers count, even if a fast kernel skips
    them because nothing below them is trained.

    Args:
        rows: from :meth:`Model.prepare`, not encoded.
        batch_size: number of rows that share one pass over the class names, if the model has a text encoder for them.
    """
    if not len(rows):
        return None
    index = 0
    if rows.tokens is not None:
        lengths = rows.tokens.length[:_LOOK].tolist()
        index = sorted(range(len(lengths)), key=lengths.__getitem__)[len(lengths) // 2]
    row = rows.take([index])
    total = _count(model, row.batch([0]))
    names = _names(model)
    shared = names - math.ceil(names / batch_size)
    encoded = model.encode(row)
    cached = encoded.tensors.keys() - row.tensors.keys()
    if encoded is row or not cached or "features" in row.tensors:
        return Macs(total - shared, 0)
    training = _count(model, encoded.batch([0]))
    return Macs(training - shared, total - training)


def _count(model: Model, batch: Batch) -> int:
    hollow, model.hollow = model.hollow, False  # only shapes matter here
    try:
        return _count_forward(model, batch)
    finally:
        model.hollow = hollow


def _count_forward(model: Model, batch: Batch) -> int:
    with model.evaluating(), torch.random.fork_rng(devices=[]), _Counter() as counter:
        model.logits(batch)
    return int(counter.macs)


def _names(model: Model) -> int:
    """MACs of one pass over the class names; 0 if the model reads no names, or reads them only once."""
    if not is_dual_model(model):
        return 0
    with model.evaluating(), torch.random.fork_rng(devices=[]), _Counter() as counter:
        model.dual.texts()
    return int(counter.macs)


class _Counter(TorchFunctionMode):
    """Counts the products of a forward pass; the name of each called function decides how.

    ``torch.utils.flop_counter`` also counts them, but loads the compiler (1.5 s) and does not count the fused attention
    of CPUs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.macs += _macs(getattr(func, "__name__", ""), args, kwargs or {}, out)
        return out


def _macs(name: str, args: Any, kwargs: Any, out: Any) -> int:
    """MACs of one call: the number of the result's entries, times the number of products in each entry."""
    if name == "scaled_dot_product_attention":
        q, k, v = (_argument(args, kwargs, at, word) for at, word in enumerate(("query", "key", "value")))
        return int(q.numel() * k.shape[-2] + q.numel() // q.shape[-1] * k.shape[-2] * v.shape[-1])
    if name in ("linear", "conv1d", "conv2d", "conv3d"):
        return int(out.numel() * _argument(args, kwargs, 1, "weight")[0].numel())
    if name in _FIRST:
        return int(out.numel() * _argument(args, kwargs, 0, "self", "input", "mat1").shape[-1])
    if name in _SECOND:  # the product is added to the first argument
        return int(out.numel() * _argument(args, kwargs, 1, "mat1", "batch1").shape[-1])
    return 0


_GROUPED = ("grouped_mm", "_grouped_mm")  # products of the chosen experts
_FIRST = (
    "matmul",
    "__matmul__",
    "mm",
    "bmm",
    *_GROUPED,
)  # products that sum over the last axis of their first factor
_SECOND = ("addmm", "baddbmm")  # products that are added to the first argument


def _argument(args: Sequence[Any], kwargs: Any, at: int, *words: str) -> Any:
    """An argument, by position or by one of its names."""
    return args[at] if len(args) > at else next(kwargs[word] for word in words if word in kwargs)


@dataclass(frozen=True)
class Costs:
    """MACs of a run's clients.

    Attributes:
        macs_per_sample: MACs of a sample's forward pass in each epoch.
        macs_once_per_sample: MACs of a sample's forward pass through a frozen backbone whose features are cached;
            0 without such a backbone.
        epochs: number of epochs E.
        samples: median number of training samples of a client.
    """

    macs_per_sample: int
    macs_once_per_sample: int
    epochs: int
    samples: float

    @classmethod
    def of(cls, macs: Macs, epochs: int, samples: Sequence[int]) -> Costs:
        """Costs of clients with these numbers of training samples."""
        return cls(macs.training, macs.once, epochs, float(median(samples)))

    @property
    def macs_per_client_round(self) -> float:
        """E n MACs of the median client."""
        return self.epochs * self.samples * self.macs_per_sample

    def tmac(self, cohorts: Sequence[Sequence[str]], extra_passes: Sequence[float] = ()) -> float:
        """MACs of the rounds of these cohorts; a frozen backbone counts once for each client.

        Args:
            extra_passes: for each round, the number of passes over a client's rows beyond the optimiser's epochs. It is
                averaged over the cohort as the updates are. FedALA makes such passes to train its W.
        """
        visits = sum(map(len, cohorts))
        more = sum(len(cohort) * passes for cohort, passes in zip(cohorts, extra_passes, strict=False))
        return visits * self.macs_per_client_round + more * self.samples * self.macs_per_sample + self.once(cohorts)

    def once(self, cohorts: Sequence[Sequence[str]]) -> float:
        """MACs of the frozen backbone."""
        return len({client for cohort in cohorts for client in cohort}) * self.samples * self.macs_once_per_sample


def rounds_to(target: float, accuracies: Sequence[tuple[int, float | None]]) -> int | None:
    """The first of the rounds (number, accuracy) that reaches the target; None if none does.

    Example:
        >>> rounds_to(0.5, [(0, 0.1), (1, None), (2, 0.5), (3, 0.4)])
        2
    """
    reached = (t for t, a in accuracies if a is not None and math.isfinite(a) and a >= target)
    return next(reached, None)
