"""The steps of an audit, cheap attacks first, and the limit on its time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fedfm.audits.shadow_runs import cost
from fedfm.errors import InputError
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run

LONG = 10.0  # seconds of the longest attack that shares a replay with others


class HasCost(Protocol):
    """An attack, as far as its cost goes; attributes as of :class:`~fedfm.audits.audit.Audit`."""

    replays: ClassVar[bool]

    def seconds(self, run: Run, population: Partitioned) -> float:
        """Seconds that it may take on one core, without the replay of the run."""


@dataclass(frozen=True)
class Step:
    """Attacks that share a replay; or a single attack.

    Attributes:
        names: of the attacks.
        seconds: estimated for one core, replay included.
    """

    names: Sequence[str]
    seconds: float
    replays: bool


def steps(run: Run, population: Partitioned, chosen: Mapping[str, HasCost]) -> list[Step]:
    """The attacks in order of their cost. One that takes longer than a replay gets a replay of its own."""
    each = {name: audit.seconds(run, population) for name, audit in chosen.items()}
    again = replay_seconds(run, population)
    reading = [name for name, audit in chosen.items() if audit.replays]
    together = [name for name in reading if each[name] <= max(again, LONG)]
    alone = [name for name in chosen if name not in together]
    found = [Step([name], each[name] + again * (name in reading), name in reading) for name in alone]
    if together:
        together.sort(key=lambda name: each[name])
        seconds = again + sum(each[name] for name in together)
        found.append(Step(together, seconds, True))
    return sorted(found, key=lambda step: step.seconds)


def replay_seconds(run: Run, population: Partitioned) -> float:
    """Estimated seconds of the rounds of a run in one process.

    The estimate uses the measured seconds and the cores in use; counts bound it after a slow network or a pause.
    """
    cores = run.experiment.run.workers or int(run.manifest["machine"].get("cores") or 1)
    recorded = float(run.manifest["result"]["seconds"]) * min(cores, max(len(population.clients), 1))
    return max(min(recorded, cost(run, population)), 1.0)


class TimeUpError(KeyboardInterrupt):
    """The time of an audit is up. Clients' code turns errors into faults; this passes through it, as Ctrl-C does."""


def deadline(limit: float | None) -> float | None:
    """When an audit that begins now must end, by the monotonic clock.

    Raises:
        InputError: the limit is not a positive number of seconds.
    """
    if limit is None:
        return None
    if not 0 < limit < float("inf"):
        raise InputError(f"--time-limit {limit:g}: expected a positive number of seconds")
    return time.monotonic() + limit


@contextlib.contextmanager
def until(end: float | None) -> Iterator[None]:
    """Context: raise :class:`TimeUpError` inside at the time ``end``.

    Only the main thread can be interrupted; another thread checks the time once, before the code begins.
    """
    if end is None:
        yield
        return
    left = end - time.monotonic()
    if left <= 0:
        raise TimeUpError
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: Any) -> None:
        if os.getpid() == owner:
            raise TimeUpError

    owner, before = os.getpid(), signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, left)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def command(path: object, names: Sequence[str]) -> str:
    """Run these attacks."""
    return " ".join([f"fedfm audit {path}", *(f"--attack {name}" for name in names)])
