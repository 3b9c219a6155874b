"""Local training by DP-SGD.

The gradients of single rows are computed in closed form for heads on features, by packed batches for LoRA of the
transformers that :mod:`fedfm.training.packed` supports, and layer by layer for other models.

Abadi et al. 2016, Algorithm 1 (see :mod:`fedfm.privacy.dp_sgd`): a step uses the sum of the batch's clipped row
gradients, plus noise N(0, (z C)^2), divided by the expected size of a batch. Everything that follows costs no privacy:
the optimiser, momentum, weight decay, the proximal term and the correction do not see rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfm.core.client import ClientData
from fedfm.core.rows import Rows
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.privacy import plausibility
from fedfm.privacy.dp_sgd import DescentPlan, PrivateSteps
from fedfm.training import cached_head, packed
from fedfm.training.local_job import Job
from fedfm.training.loop import flat_of
from fedfm.training.row_gradients import agrees, clipped_sum, factors
from fedfm.training.update_rules import Rule


@dataclass(frozen=True)
class Descent:
    """The settings with which a client optimiser trains by DP-SGD."""

    plan: DescentPlan
    data: ClientData


class Counted:
    """The training rows as a client half gets them: it may only count the rows; the local optimiser reads them."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getattr__(self, name: str) -> object:
        raise InputError(
            f'privacy.mechanism = "dp_sgd": this client half reads its training rows ({name}) past the private '
            "optimiser; no epsilon covers that",
            key="privacy.mechanism",
        )


def hide_rows(data: ClientData) -> ClientData:
    """The same data with training rows that can only be counted."""
    return ClientData(lambda: Counted(data.train), lambda: data.val, lambda: data.test)  # type: ignore[arg-type,return-value]


def fits(model: Model) -> None:
    """Refuse a model for which the gradients of single rows cannot be computed.

    Raises:
        InputError: the model has batch norm in training mode, gradient checkpointing, compiled blocks, or a loss that
            mixes the rows of a batch.
    """
    for key in ("gradient_checkpointing", "compile"):
        if getattr(model.spec, key):
            raise InputError(
                f'privacy.mechanism = "dp_sgd" reads gradients inside of layers, which model.{key} hides; drop {key}',
                key="privacy.mechanism",
            )
    if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in getattr(model, "train_too", ())):
        raise InputError(
            'privacy.mechanism = "dp_sgd": the statistics of batch norm mix the rows of a batch, so that no gradient '
            "belongs to one row; expected a model with group or layer norm, or adaptation head or lora",
            key="privacy.mechanism",
        )
    if reason := getattr(model, "mixes_rows", ""):
        raise InputError(
            f'privacy.mechanism = "dp_sgd": {reason}, so that no gradient belongs to one row; privacy.unit = "client" '
            "puts noise on a client's update instead",
            key="privacy.mechanism",
        )


def train(jobs: Sequence[Job]) -> list[Params]:
    """Train one job after the other, privately. The loss is not reported, because it depends on the rows."""
    return [train_one(job) for job in jobs]


def train_one(job: Job, after: Callable[[], None] = lambda: None) -> Params:
    """Train one client privately.

    Args:
        after: called after each step.
    """
    client, local = job.client, job.local
    private = client.private
    if not isinstance(private, Descent):
        raise RunError("this client trains without noise: the runtime gives it no plan of DP-SGD")
    model = client.model
    rows = private.data.train
    n = len(rows)
    client.metrics.pop("loss", None)
    if not n:
        return job.w
    fits(model)
    budget = PrivateSteps(private.plan, client, n, local.batch_size, local.steps(n))
    budget.begin(_start(job, rows))
    first = budget.includes_first_step
    model.load(job.w)
    flat = flat_of(model)
    live = {name: p for name, p in model.live().items() if job.terms.only is None or name in job.terms.only}
    place = torch.cat([torch.full((p.numel(),), name in live) for name, p in model.live().items()])
    rule = Rule(local, flat.p, flat.places(getattr(model, "no_weight_decay", ())))
    start = flat.p.clone()
    correction = None if job.terms.correction is None else flat.flat(job.terms.correction)
    total_of = sums(model, rows, private.plan.clip_norm, 2 * local.batch_size, job.terms.only)  # few batches are larger
    frozen = _marks(model, live) if first else {}
    if first and (said := plausibility.of_delta(private.plan.delta, n, "training rows of this client")):
        client.log(said)
    model.train_mode()
    # LoRA's dropout draws from torch's global generator, so the generator gets this client's own seed.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(client.seed)
        for step in range(local.steps(n)):
            total = total_of(budget.batch(step))
            g = torch.from_numpy(budget.noisy(total.numpy(), step) / budget.expected_size)
            flat.g.zero_()
            flat.g[place] = g.to(flat.g)
            if job.terms.mu:
                flat.g.add_(flat.p - start, alpha=job.terms.mu)
            if correction is not None:
                flat.g.add_(correction)
            rule.step(flat.p, flat.g)
            if not place.all():  # reverts weight decay and corrections
                flat.p[~place] = start[~place]
            if step == 0 and first:
                _check_moved(model, live, job.w, frozen)
            after()
    budget.end()
    flat.g.zero_()
    model.eval_mode()
    return model.params() if job.terms.only is None else job.w.replace(model.params().only(job.terms.only))


def sums(
    model: Model, rows: Rows, clip_norm: float, most: int, only: tuple[str, ...] | None = None
) -> Callable[[np.ndarray], Tensor]:
    """A function from a step's row indexes (b,) to the sum (P,) of these rows' clipped gradients (float64, no noise).

    Args:
        most: largest number of rows that are computed at once.
        only: names of the trained tensors; None trains all of them.
    """
    live = {name: p for name, p in model.live().items() if only is None or name in only}
    numbers = sum(p.numel() for p in live.values())
    of_head = _head(model, rows, clip_norm) if cached_head.applies(model) and only is None else None
    of_rows = packed.row_gradients(model, rows) if of_head is None and only is None else None
    by_layers: bool | None = None  # whether one backward pass is enough for many rows; the first two rows decide

    def total(index: np.ndarray) -> Tensor:
        nonlocal by_layers
        found = torch.zeros(numbers, dtype=torch.float64)
        if by_layers is None and of_head is None and of_rows is None and len(index) > 1:
            by_layers = agrees(model, rows, index[:2], live)
        for at in range(0, len(index), most):
            part = index[at : at + most]
            if of_head is not None:
                found += of_head(part)
            elif of_rows is not None:
                found += of_rows.clipped_sum(part, clip_norm)
            else:
                found += clipped_sum(model, rows, part, clip_norm, live, bool(by_layers))
        return found

    return total


def _start(job: Job, rows: Rows) -> str:
    """A text of everything on which the steps depend, except the secret and the number of rows."""
    client, model = job.client, job.client.model
    correction = "" if job.terms.correction is None else job.terms.correction.sha256()
    of_model = (model.fingerprint, repr(model.spec), model.kernels, str(model.device), str(model.layout.entries))
    of_job = (job.w.sha256(), repr(job.terms.mu), correction, repr(job.terms.only), repr(job.local), repr(client.span))
    return "\n".join((rows.sha256(), repr((client.id, client.round, client.seed)), *of_job, *of_model))


def _head(model: Model, rows: Rows, clip_norm: float) -> Callable[[np.ndarray], Tensor]:
    """:func:`sums` for a linear head: row i's gradient is e_i (x_i, 1)^T, of norm ||e_i|| sqrt(||x_i||^2 + 1)."""
    x, labels = rows.tensors["features"].float(), rows.labels
    if labels is None:
        raise ValueError("a head is trained on labelled rows")
    head, squares = model._existing_head(), x.square().sum(1) + 1

    def total(index: np.ndarray) -> Tensor:
        at = torch.from_numpy(index)
        batch = x[at]
        e = torch.addmm(head.bias.detach(), batch, head.weight.detach().T).softmax(1)
        e[torch.arange(len(at)), labels[at]] -= 1
        c = factors(e.square().sum(1) * squares[at], clip_norm)[:, None]
        e, batch = torch.where(c > 0, e * c, 0.0), torch.where(c > 0, batch, 0.0)
        of = {id(head.weight): (e.T @ batch).reshape(-1), id(head.bias): e.sum(0)}
        return torch.cat([of[id(p)] for p in model.live().values()])

    return total


def _marks(model: Model, live: dict[str, Tensor]) -> dict[str, int]:
    """A hash of each of the module's tensors that are not trained, by name."""
    trained = {id(p) for p in live.values()}
    tensors = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
    rest = {name: t.detach() for name, t in tensors.items() if id(t) not in trained and t.numel()}
    return {name: int(torch.hash_tensor(t).view(torch.int64)) for name, t in rest.items()}


def _check_moved(model: Model, live: dict[str, Tensor], start: Params, frozen: dict[str, int]) -> None:
    """Check after the first private step that the trained tensors have changed and all others have not.

    Raises:
        RunError: a trained tensor is unchanged, or another one has changed; the message names the first such tensor.
    """
    for name, p in live.items():
        if p.numel() and torch.equal(p.detach().cpu(), start[name]):
            raise RunError(
                f"DP-SGD: {name} did not move in the first private step, not even by its noise; the optimiser does not "
                "reach it, or its dtype is too coarse for so small a step"
            )
    for name, mark in _marks(model, live).items():
        if mark != frozen[name]:
            raise RunError(f"DP-SGD: {name} is frozen but changed in the first private step; no noise covers it")
