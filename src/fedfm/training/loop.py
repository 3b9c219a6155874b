"""Local training of one client by autograd, for every model. The result depends only on this client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.core.rows import Batch, Rows
from fedfm.errors import InputError
from fedfm.linalg import pages
from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Params
from fedfm.models.derived_modules import Bounded, hinge, penalties
from fedfm.models.memory_budget import in_halves, warn
from fedfm.models.model import Model
from fedfm.training.local_job import Job, over_classes
from fedfm.training.optimisers import ABSENT
from fedfm.training.update_rules import PIECE, Rule

# Models of `fedfm distil` compute polynomials, each valid in an interval. This is the weight of the penalty on inputs
# outside the intervals. The 10 of `fedfm distil` is too small here: no interval is measured again after training.
PENALTY = 1000.0
_ZERO = torch.zeros((), dtype=torch.float64)


class Flat:
    """A model's trainable parameters and gradients as views of two flat vectors."""

    def __init__(self, live: dict[str, Tensor]) -> None:
        if len({tensor.dtype for tensor in live.values()}) > 1:
            raise TypeError("the trainable parameters of one model must have one dtype")
        self.names = tuple(live)
        self.p = torch.cat([tensor.detach().reshape(-1) for tensor in live.values()])
        self.g, self._live = torch.empty(0), tuple(live.values())
        for tensor, piece in self._pieces():
            tensor.data = self.p[piece].view(tensor.shape)
        self.allocate_gradients()

    @property
    def lean(self) -> bool:
        """Whether the model is so large that its gradients are freed between two steps."""
        return self.p.nbytes >= pages.LARGE

    def allocate_gradients(self) -> None:
        """Allocate gradients of 0."""
        if len(self.g) != len(self.p):
            self.g = torch.zeros_like(self.p)
            for tensor, piece in self._pieces():
                tensor.grad = self.g[piece].view(tensor.shape)

    def clear(self) -> None:
        """Set the gradients to 0. For a large model they are freed, and the next backward pass allocates them again."""
        if not self.lean:
            self.allocate_gradients()
            self.g.zero_()
            return
        self.g = torch.empty(0)
        for tensor in self._live:
            tensor.grad = None

    def collect(self) -> None:
        """Collect the gradients of the last backward passes in ``g``; each tensor's own gradient is freed."""
        if len(self.g) != len(self.p):
            self.g = torch.zeros_like(self.p)
            for tensor, piece in self._pieces():
                if tensor.grad is not None:
                    self.g[piece].add_(tensor.grad.reshape(-1))
                    tensor.grad = None

    def pieces(self, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice, gradient) for pieces of ``size`` entries. All pieces use the same memory, and each tensor's own
        gradient is freed once it is copied.
        """
        stage, at, filled = torch.empty(size, dtype=self.p.dtype, device=self.p.device), 0, 0
        for tensor, piece in self._pieces():
            gradient = None if tensor.grad is None else tensor.grad.reshape(-1)
            done, count = 0, piece.stop - piece.start
            while done < count:
                take = min(size - filled, count - done)
                part = stage[filled : filled + take].zero_()
                if gradient is not None:
                    part.add_(gradient[done : done + take])  # added to zeros, as in collect, for the same bits
                done, filled = done + take, filled + take
                if filled == size:
                    yield slice(at, at + size), stage
                    at, filled = at + size, 0
            tensor.grad = gradient = None
        if filled:
            yield slice(at, at + filled), stage[:filled]

    def _pieces(self) -> Iterator[tuple[Tensor, slice]]:
        """Each trained tensor and its slice of the vectors."""
        at = 0
        for tensor in self._live:
            yield tensor, slice(at, at + tensor.numel())
            at += tensor.numel()

    def flat(self, w: Params) -> Tensor:
        """The trainable parameters, with their values in ``w``, as one flat vector."""
        if tuple(w) == self.names:
            return w.flats[self.p.dtype].to(self.p.device)
        return torch.cat([w[name].reshape(-1) for name in self.names]).to(self.p.device)

    def places(self, names: Collection[str]) -> list[slice]:
        """The slices of the tensors ``names`` in the vectors; names of tensors that are not trained are skipped."""
        return [piece for name, (_, piece) in zip(self.names, self._pieces(), strict=True) if name in names]

    def bound(self, live: dict[str, Tensor]) -> bool:
        """Whether ``live`` has the parameters of this object, and they are still views of its vectors."""
        first = next(iter(live.values()))
        return tuple(live) == self.names and first.untyped_storage().data_ptr() == self.p.untyped_storage().data_ptr()


_flats: WeakKeyDictionary[Any, Flat] = WeakKeyDictionary()


def flat_of(model: Model) -> Flat:
    """The model's Flat with gradients, made at the first call."""
    live = model.live()
    flat = _flats.get(model)
    if flat is None or not flat.bound(live):
        flat = _flats[model] = Flat(live)
    flat.allocate_gradients()
    return flat


def train(jobs: Sequence[Job]) -> list[Params]:
    """Train one job after the other."""
    return [_train(job) for job in jobs]


def _train(job: Job) -> Params:
    model = job.client.model
    large = job.w.nbytes >= pages.LARGE
    if large:
        buffers.give_back()
    model.load(job.w)
    flat = flat_of(model)
    rule = Rule(job.local, flat.p, flat.places(getattr(model, "no_weight_decay", ())))
    start = flat.p.clone() if job.terms.mu else None
    correction = flat.flat(job.terms.correction) if job.terms.correction is not None else None
    live = model.live()
    frozen = {} if job.terms.only is None else {n: p for n, p in live.items() if n not in job.terms.only}
    values = [p.detach().clone() for p in frozen.values()]
    seen, total = 0, torch.zeros((), dtype=torch.float64, device=flat.p.device)
    flat.clear()
    # If only the rule reads the gradients, no vector of all gradients is needed.
    alone = flat.lean and start is None and correction is None and not frozen and job.local.max_grad_norm is None
    backward, rates = _Backward(job, flat), job.rates()
    model.train_mode()
    # LoRA's dropout draws from torch's global generator, so the generator gets this client's own seed.
    with torch.random.fork_rng(devices=[]), _without_gradients(frozen.values()):
        torch.manual_seed(job.client.seed)
        for rows, index in job.batches():
            loss = backward(rows, index)
            rule.eta = next(rates)
            if alone:
                rule.step_by(flat.p, flat.pieces(PIECE))
                seen, total = seen + len(index), total + loss * len(index)
                continue
            flat.collect()
            job.local.shorten(flat.g)
            if start is not None:
                flat.g.add_(flat.p - start, alpha=job.terms.mu)
            if correction is not None:
                flat.g.add_(correction)
            rule.step(flat.p, flat.g)
            for p, value in zip(frozen.values(), values, strict=True):  # frozen tensors get back their values
                p.data.copy_(value)
            flat.clear()
            seen, total = seen + len(index), total + loss * len(index)
    model.eval_mode()
    job.client.metrics["loss"] = float(total) / max(seen, 1)
    del rule, start, correction, values, backward  # makes room for the result
    if large:
        buffers.give_back()
    trained: Params = model.params()
    # With ``only``, the running statistics of batch norm also stay as in w.
    return trained if job.terms.only is None else job.w.replace(trained.only(job.terms.only))


class _Backward:
    """Adds the gradient of a batch's mean loss to the tensors' gradients, in parts if settings or memory require it."""

    def __init__(self, job: Job, flat: Flat) -> None:
        self.model, self.note = job.client.model, job.client.log
        self.loss = _within_intervals(self.model, loss_of(job))
        self.flat, self.most = flat, job.local.micro_batch

    def __call__(self, rows: Rows, index: np.ndarray) -> Tensor:
        """The mean loss over these rows, float64, kept on its device; reading it would synchronise the GPU."""
        size = min(self.most or len(index), len(index))
        if getattr(self.model, "mixes_rows", ""):
            return self._add(rows, index, size)

        def add_again(size: int) -> Tensor:
            self.flat.clear()
            return self._add(rows, index, size)

        loss, fit = in_halves(size, add_again, self._say)
        self.most = fit if fit < size else self.most
        return loss

    def _say(self, text: str) -> None:
        """Write into the silo's log, and warn the user who started this process."""
        self.note(text)
        warn(text)

    def _add(self, rows: Rows, index: np.ndarray, size: int) -> Tensor:
        weigh = getattr(self.model, "weigh", None)
        if size == len(index) and weigh is None:
            return self._one(rows.batch(index), 1.0)
        parts = [rows.batch(index[at : at + size]) for at in range(0, len(index), size)]
        if weigh is not None:
            return sum((self._one(part, factor) for part, factor in weigh(parts)), _ZERO)
        counts = [self.model.count_targets(part) for part in parts]
        shares = ((part, count / sum(counts)) for part, count in zip(parts, counts, strict=True) if count)
        losses = (self._one(part, share) for part, share in shares)  # "if count": the loss of no targets is NaN
        return sum(losses, _ZERO)

    def _one(self, batch: Batch, share: float) -> Tensor:
        loss: Any = self.loss(batch) * share
        loss.backward()
        return loss.detach().double()  # type: ignore[no-any-return]


@contextmanager
def _without_gradients(parameters: Collection[Tensor]) -> Iterator[None]:
    """Context manager: these parameters get no gradient, so the backward pass ends at the lowest trained parameter."""
    for p in parameters:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(True)


def loss_of(job: Job) -> Callable[[Batch], Tensor]:
    """The local objective without the proximal term.

    If the optimiser sets ``absent``, the objective replaces the logits of classes that the client does not have.

    Raises:
        InputError: ``absent`` is set and the rows have no labels, or the model's loss is not a cross-entropy.
    """
    model, labels = job.client.model, job.client.data.train.labels
    value = ABSENT[job.local.absent]
    if value is None:
        return model.loss
    over_classes(model, job.local)
    if labels is None:
        raise InputError(
            f'method.local.absent = "{job.local.absent}": the rows have no labels; drop it', key="method.local.absent"
        )
    present = torch.zeros(len(model.classes), dtype=torch.bool)
    present[torch.unique(labels)] = True

    def loss(batch: Batch) -> Tensor:
        logits = model.logits(batch).float()  # (b, C)
        logits = logits.masked_fill(~present.to(logits.device), value)
        return F.cross_entropy(logits, batch["labels"].to(logits.device))

    return loss


def _within_intervals(model: Model, loss: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """The loss. If trained blocks compute polynomials, it includes a penalty on inputs outside the valid intervals.

    Just outside its interval a polynomial already overflows, and encrypted values cannot be clamped.
    """
    replaced = [m for m in getattr(model, "train_too", ()) if isinstance(m, Bounded)]
    if not replaced:
        return loss

    def penalised_loss(batch: Batch) -> Tensor:
        hinge(replaced)
        found = loss(batch)
        excess = penalties(replaced)
        return found + PENALTY * excess if excess.requires_grad else found

    return penalised_loss
