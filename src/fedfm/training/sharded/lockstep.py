"""One client's passes over its rows by all ranks together.

Each rank has all rows, and reads its part of each batch. In training all ranks make the same steps. In evaluation ranks
may need different numbers of forward passes: a rank that has finished makes passes, whose results are dropped, until
all have finished, since every pass collects the weights of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedfm import seeds
from fedfm.core.client import Client, ClientData, Terms
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.training.local_job import Job
from fedfm.training.loop import loss_of
from fedfm.training.optimisers import Local
from fedfm.training.sharded.shards import TrainedShards, root_of
from fedfm.training.update_rules import Rule


@dataclass(frozen=True)
class ClientPass:
    """One client's local training, from the parameters that the ranks have.

    Attributes:
        most: largest number of rows of a rank at once.
    """

    rows: Rows
    local: Local
    terms: Terms
    seed: int
    span: tuple[float, float]
    most: int


def train(model: Model, work: ClientPass, say: Callable[[str], None] = lambda text: None) -> float:
    """Train; the ranks then have the trained parameters. Returns the mean loss over the steps.

    Args:
        say: is called after each step.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    no_rows = Rows()
    data = ClientData(lambda: work.rows, lambda: no_rows, lambda: no_rows)
    client = Client("", data, model, {}, work.seed, span=work.span)
    job = Job(client, Params({}), work.local, work.terms)
    shards, terms = TrainedShards(model), work.terms
    rule = Rule(work.local, shards.p, shards.places(model.no_weight_decay))
    start = shards.p.clone() if terms.mu else None
    correction = None if terms.correction is None else shards.flat(terms.correction)
    frozen = [] if terms.only is None else shards.places([name for name in model.live() if name not in terms.only])
    kept = [shards.p[piece].clone() for piece in frozen]
    backward, rates = _SharedBackward(job, work.most), job.rates()
    seen, total = 0, torch.zeros((), dtype=torch.float64, device=shards.p.device)
    model.train_mode()
    # Each rank draws LoRA's dropout for its own rows.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.derive(work.seed, "rank", rank))
        for step, (rows, index) in enumerate(job.batches()):
            loss = backward(rows, index)
            rule.eta = next(rates)
            g = shards.gradients()
            shards.shorten(g, work.local.max_grad_norm)
            if start is not None:
                g.add_(shards.p - start, alpha=terms.mu)
            if correction is not None:
                g.add_(correction)
            rule.step(shards.p, g)
            for piece, value in zip(frozen, kept, strict=True):
                shards.p[piece] = value
            shards.store()
            seen, total = seen + len(index), total + loss * len(index)
            say(f"step {step + 1} of {ranks} ranks")
    model.eval_mode()
    dist.all_reduce(total)
    return float(total) / max(seen, 1)


class _SharedBackward:
    """Computes this rank's part of the gradient of a batch's mean loss.

    A batch is cut into parts of ``micro_batch`` rows, or without this setting into one part a rank. The ranks take the
    parts in turn. So with ``micro_batch`` the sums within a part are those of one process, bit for bit.
    """

    def __init__(self, job: Job, most: int) -> None:
        self._model, self._loss = job.client.model, loss_of(job)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._size = most

    def __call__(self, rows: Rows, index: np.ndarray) -> Tensor:
        """This rank's part of the mean loss, float64: its sum over its targets, divided by all ranks' targets."""
        model, parts = self._model, [index[at : at + self._size] for at in range(0, len(index), self._size)]
        counts = [model.count_targets(rows.batch(part)) for part in parts]
        counted = [(part, count / sum(counts)) for part, count in zip(parts, counts, strict=True) if count]
        total = torch.zeros((), dtype=torch.float64, device=model.device)
        for turn in range(0, len(counted), self._ranks):
            idle = turn + self._rank >= len(counted)
            part, share = counted[turn if idle else turn + self._rank]
            # A rank without a part makes the passes of rank 0, since each pass collects weights from all ranks.
            loss = self._loss(rows.batch(part)) * (0.0 if idle else share)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double()
        return total


@contextmanager
def at_own_pace(model: Model, rows: Rows, say: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Context manager: ranks may make different numbers of forward passes, without gradients; all leave together.

    Args:
        rows: any rows, at least one; the same on all ranks.
        say: is called before each pass.
    """
    root: Any = root_of(model)
    waiting = False

    def announce(module: nn.Module, args: Any) -> None:
        say("a pass without gradients")
        if not waiting:
            _at_work(True)

    hook = root.register_forward_pre_hook(announce, prepend=True)  # before the hook that collects weights
    try:
        yield
        waiting = True
        while _at_work(False):
            with model.evaluating():
                model.outputs(rows.batch([0]))
    finally:
        hook.remove()
        root.reshard()


def _at_work(here: bool) -> bool:
    """Whether any rank makes a pass of its own now; all ranks have to ask."""
    count = torch.tensor(int(here))
    dist.all_reduce(count)
    return bool(count)
