"""Schedule local training: one client at a time, or a chunk of several clients as one batch.

A method's client handler is written for one client and calls ``self.local(client, w)``. If a chunk of clients trains
as one batch, each handler runs in a greenlet. The greenlets stop at :attr:`fedfm.core.client.Client.trainer`. Then all
jobs are trained together, and each handler continues with its own result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import greenlet

from fedfm.core.client import Client, Terms
from fedfm.errors import first_line
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.training import cached_head, packed
from fedfm.training.local_job import Job
from fedfm.training.optimisers import Local

_HEADS = (64, 4)  # largest and smallest chunk of heads; a message to a worker takes the time of training several heads

# Whether autograd trains even models that compiled loops support.
_autograd: ContextVar[bool] = ContextVar("autograd", default=False)

Trainer = Callable[[Sequence[Job]], list[Params]]


class _Chunk(greenlet.greenlet):  # type: ignore[misc]
    """The greenlet of one running client handler; its parent greenlet is the scheduler, which collects the jobs."""


def train_client(client: Client, w: Params, local: Local, terms: Terms) -> Params:
    """Train one client; :class:`~fedfm.core.client.Client` calls this function as its trainer."""
    return train(Job(client, w, local, terms))


def train(job: Job) -> Params:
    """Train together with the other clients of the chunk; without a chunk, train alone."""
    current = greenlet.getcurrent()
    # Overridden weights belong to this client, so no other handler may run now.
    if isinstance(current, _Chunk) and not getattr(job.client.model, "weights_overridden", 0):
        return current.parent.switch(job)  # type: ignore[no-any-return]
    return _train_alone(job)


def trainer_for(
    model: Model, local: Local | None = None, only: Sequence[str] | None = None, protected: bool = False
) -> Trainer:
    """DP-SGD's trainer if ``protected``; else a fast trainer if one supports these arguments; else the loop."""
    if protected:
        from fedfm.training import private

        return private.train
    if (by_group := getattr(model, "train_jobs", None)) is not None and not cached_head.applies(model):
        return by_group  # type: ignore[no-any-return]
    if only is None and (local is None or _is_plain(local)) and trains_without(model):
        if not cached_head.applies(model):
            return packed.train
        from fedfm.training import heads

        return heads.train
    from fedfm.training import loop

    return loop.train


def _is_plain(local: Any) -> bool:
    """Whether the fast trainers implement everything that the optimiser does."""
    return local.absent == "keep" and not local.looks and not local.stepwise


def trains_without(model: Model) -> bool:
    """Whether a fast trainer supports the model; such a trainer does not call the model's modules."""
    return cached_head.applies(model) or packed.applies(model, getattr(model, "kernels", "exact"))


def width(model: Model | None) -> int:
    """Largest number of clients in a chunk."""
    return _HEADS[0] if cached_head.applies(model) else packed.width(model)


def least(model: Model | None) -> int:
    """Smallest number of clients in a chunk."""
    return _HEADS[1] if cached_head.applies(model) else -(-packed.width(model) // 2)


def compiles(model: Model, local: Local | None) -> bool:
    """Whether training this model loads loops that numba compiles."""
    return cached_head.applies(model) and (local is None or _is_plain(local))


@contextmanager
def by_autograd() -> Iterator[None]:
    """Context manager: train without compiled loops, which is slower; results are equal within rounding."""
    token = _autograd.set(True)
    try:
        yield
    finally:
        _autograd.reset(token)


def prepare(model: Model | None) -> None:
    """Load the kernels of the model's training before the process forks, so that children share them."""
    if cached_head.applies(model):
        import fedfm.linalg.kernels.softmax_sgd  # noqa: F401
    else:
        packed.prepare(model)


def trains_in_batches(model: Model | None) -> bool:
    """Whether several clients train as one batch."""
    return not cached_head.applies(model) and packed.width(model) > 1


def run_chunk(calls: Sequence[Callable[[], Any]], together: bool) -> list[Any]:
    """Run handlers with batched local training, or one after the other.

    An exception of a handler takes the place of its result; only KeyboardInterrupt is raised.
    """
    if not together or len(calls) == 1:
        return [_alone(call) for call in calls]
    results: list[Any] = [None] * len(calls)
    waiting: list[tuple[int, _Chunk, Job]] = []

    def advance(i: int, run: _Chunk, *value: Any, error: BaseException | None = None) -> None:
        try:
            out = run.throw(error) if error is not None else run.switch(*value)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:
            results[i] = failure
            return
        if run.dead:
            results[i] = out
        else:
            waiting.append((i, run, out))

    for i, call in enumerate(calls):
        advance(i, _Chunk(call))
    while waiting:
        batch, waiting = waiting, []
        by_kind: dict[tuple[Any, ...], list[tuple[int, _Chunk, Job]]] = {}
        for item in batch:
            job, terms = item[2], item[2].terms
            of_terms = (terms.mu > 0, terms.correction is None, terms.only)
            key = (id(job.client.model), id(job.local), id(job.w.layout), *of_terms)
            by_kind.setdefault(key, []).append(item)
        for items in by_kind.values():
            jobs = [job for _, _, job in items]
            try:
                trained: list[Any] = _trainer_of(jobs[0])(jobs)
            except KeyboardInterrupt:
                raise
            except BaseException as failure:
                trained = [_alone(partial(_train_alone, job)) for job in jobs]
                if not any(isinstance(out, BaseException) for out in trained):
                    # None of the clients is at fault, e.g. the memory is too small for all at once.
                    alone = f"{len(jobs)} clients could not train together, so each trains alone, which takes longer"
                    why = f"({type(failure).__name__}: {first_line(failure)})"
                    warnings.warn(f"{alone} {why}", RuntimeWarning, stacklevel=2)
            for (i, run, _), out in zip(items, trained, strict=True):
                if isinstance(out, BaseException):
                    advance(i, run, error=out)
                else:
                    advance(i, run, out)
    return results


def _train_alone(job: Job) -> Params:
    return _trainer_of(job)([job])[0]


def _trainer_of(job: Job) -> Trainer:
    found = trainer_for(job.client.model, job.local, job.terms.only, job.client.private is not None)
    if _autograd.get():
        from fedfm.training import heads, loop

        return loop.train if found is heads.train else found
    return found


def _alone(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as failure:
        return failure
