"""Local training of one client: forward, backward, step. Works for every model; its result depends on nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.core.rows import Batch
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.training.job import Job
from fedfm.training.optimisers import ABSENT, Local
from fedfm.training.update_rules import Rule


class Flat:
    """A model's trainable parameters and gradients as views of two flat vectors: one copy loads, one operation
    steps.
    """

    def __init__(self, live: dict[str, Tensor]) -> None:
        first = next(iter(live.values()))
        total = sum(p.numel() for p in live.values())
        self.names = tuple(live)
        self.p = torch.empty(total, dtype=first.dtype, device=first.device)
        self.g = torch.zeros_like(self.p)
        at = 0
        for tensor in live.values():
            if tensor.dtype != first.dtype:
                raise TypeError("trainable parameters of one model have one dtype")
            piece = slice(at, at + tensor.numel())
            self.p[piece] = tensor.detach().reshape(-1)
            tensor.data = self.p[piece].view(tensor.shape)
            tensor.grad = self.g[piece].view(tensor.shape)
            at += tensor.numel()

    def flat(self, w: Params) -> Tensor:
        """The vector of these parameters in ``w``."""
        if tuple(w) == self.names:
            return w.flats[self.p.dtype].to(self.p.device)
        return torch.cat([w[name].reshape(-1) for name in self.names]).to(self.p.device)

    def bound(self, live: dict[str, Tensor]) -> bool:
        """The same parameters are trained, and the model still uses our storage."""
        first = next(iter(live.values()))
        return tuple(live) == self.names and first.untyped_storage().data_ptr() == self.p.untyped_storage().data_ptr()


_flats: WeakKeyDictionary[Any, Flat] = WeakKeyDictionary()


def flat_of(model: Model) -> Flat:
    """The model's one, made when it is first asked for."""
    live = model.live()
    flat = _flats.get(model)
    if flat is None or not flat.bound(live):
        flat = _flats[model] = Flat(live)
    return flat


def train(jobs: Sequence[Job]) -> list[Params]:
    """One after the other."""
    return [_train(job) for job in jobs]


def _train(job: Job) -> Params:
    model, rows = job.client.model, job.client.data.train
    model.load(job.w)
    flat = flat_of(model)
    rule = Rule(job.local, flat.p)
    start = flat.p.clone() if job.mu else None
    correction = flat.flat(job.correction) if job.correction is not None else None
    still = _still(model.live(), job.only)  # (P,) entries that do not move
    fixed = None if still is None else flat.p[still]
    seen, total = 0, 0.0
    loss_of = _loss(job)
    model.train_mode()
    # Dropout, where an adaptation has it, draws from torch's global generator: give it this client's own stream.
    with torch.random.fork_rng(devices=[]), _frozen(model.live(), job.only):
        torch.manual_seed(job.client.seed)
        for index in job.orders():
            loss: Any = loss_of(rows.batch(index))
            loss.backward()
            if start is not None:
                flat.g.add_(flat.p - start, alpha=job.mu)
            if correction is not None:
                flat.g.add_(correction)
            rule.step(flat.p, flat.g)
            if still is not None and fixed is not None:  # weight decay and corrections move what has no gradient
                flat.p[still] = fixed
            flat.g.zero_()
            seen, total = seen + len(index), total + float(loss.detach()) * len(index)
    model.eval_mode()
    job.client.metrics["loss"] = total / max(seen, 1)
    trained: Params = model.params()
    return trained if job.only is None else job.w.replace(trained.only(job.only))  # running statistics, too


def _still(live: dict[str, Tensor], only: Sequence[str] | None) -> Tensor | None:
    """(P,) which entries of the flat vector do not move; None where all do."""
    if only is None:
        return None
    return torch.cat(
        [torch.full((p.numel(),), n not in only, dtype=torch.bool, device=p.device) for n, p in live.items()]
    )


@contextmanager
def _frozen(live: dict[str, Tensor], only: Sequence[str] | None) -> Iterator[None]:
    """No gradients of the tensors that do not move, meanwhile: what lies below the lowest that does costs none."""
    still = [] if only is None else [p for name, p in live.items() if name not in only]
    for p in still:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in still:
            p.requires_grad_(True)


def _loss(job: Job) -> Callable[[Batch], Tensor]:
    """The local objective without its pull: the model's loss, absent classes' logits replaced as the optimiser says.

    Raises:
        InputError: absent classes are to be replaced, and the rows have none, or the model's loss is of another kind.
    """
    model, labels = job.client.model, job.client.data.train.labels
    value = ABSENT[job.local.absent]
    if value is None:
        return model.loss
    over_classes(model, job.local)
    if labels is None:
        raise InputError(f'method.local.absent = "{job.local.absent}": the rows have no labels; drop it')
    present = torch.zeros(len(model.classes), dtype=torch.bool)
    present[torch.unique(labels)] = True

    def loss(batch: Batch) -> Tensor:
        logits = model.logits(batch).float()  # (b, C)
        logits = logits.masked_fill(~present.to(logits.device), value)
        return F.cross_entropy(logits, batch["labels"].to(logits.device))

    return loss


def over_classes(model: Model, local: Local) -> None:
    """Refuse ``absent`` where it has no meaning.

    Raises:
        InputError: the model's loss is not the cross-entropy of one logit a class.
    """
    if local.absent != "keep" and not (model.task == "classification" and getattr(model, "softmax", True)):
        raise InputError(
            f'method.local.absent = "{local.absent}": only a classifier under cross-entropy has logits of classes that '
            f'a client lacks, the task here is "{model.task}"; drop it'
        )
