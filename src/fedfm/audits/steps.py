"""Plan the order of an audit's attacks, the cheap attacks first, and enforce its time limit."""

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

LONG = 10.0  # an attack that takes more seconds does not share a replay with others


class HasCost(Protocol):
    """The part of an attack that :func:`steps` uses; attributes as in :class:`~fedfm.audits.audit.Audit`."""

    replays: ClassVar[bool]

    def seconds(self, run: Run, population: Partitioned) -> float:
        """Seconds that the attack may take on one core, not counting the replay of the run."""


@dataclass(frozen=True)
class Step:
    """A single attack, or several attacks that share a replay.

    Attributes:
        names: names of the attacks.
        seconds: estimated seconds on one core, including the replay.
    """

    names: Sequence[str]
    seconds: float
    replays: bool


def steps(run: Run, population: Partitioned, chosen: Mapping[str, HasCost]) -> list[Step]:
    """Plan the steps, cheap ones first. An attack that takes longer than a replay and than ``LONG`` gets its own."""
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
    """Estimated seconds that the rounds of a run take in one process.

    The estimate uses the run's measured seconds and the cores in use. A slow network or a pause makes these seconds too
    large, so the result is at most the estimate of :func:`~fedfm.audits.shadow_runs.cost`, which does not use a clock.
    """
    cores = run.experiment.run.workers or int(run.manifest["machine"].get("cores") or 1)
    recorded = float(run.manifest["result"]["seconds"]) * min(cores, max(len(population.clients), 1))
    return max(min(recorded, cost(run, population)), 1.0)


class TimeUpError(KeyboardInterrupt):
    """The time limit of an audit is reached.

    This is not an ``Exception``: clients' code turns exceptions into faults, but this exception must pass through, as
    Ctrl-C does.
    """


def deadline(limit: float | None) -> float | None:
    """The time on the monotonic clock at which an audit that begins now has to end; None without a limit.

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
    """Context manager: raise :class:`TimeUpError` in its body at the time ``end``.

    Only the main thread can be interrupted. In any other thread the time is checked once, before the body begins.
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
    """The command that runs these attacks."""
    return " ".join([f"fedfm audit {path}", *(f"--attack {name}" for name in names)])
