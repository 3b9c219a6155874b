"""The order of the attacks of an audit, the cheap ones first, and the limit on its time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedfm.audits.shadow_runs import cost
from fedfm.errors import InputError
from fedfm.runtime.population import Partitioned
from fedfm.runtime.run_directory import Run

if TYPE_CHECKING:
    from fedfm.audits.audit import Audit


LONG = 10.0  # seconds of an attack for which others on the same replay wait


@dataclass(frozen=True)
class Step:
    """Attacks that are done together, because they read the same replay; or a single one.

    Attributes:
        seconds: that it may take, of one core, replay included.
    """

    audits: Mapping[str, Audit]
    seconds: float
    replays: bool


def steps(run: Run, population: Partitioned, chosen: Mapping[str, Audit]) -> list[Step]:
    """The attacks in order of their cost. A long one that takes longer than a replay has a replay of its own."""
    each = {name: audit.seconds(run, population) for name, audit in chosen.items()}
    again = replay_seconds(run, population)
    reading = [name for name, audit in chosen.items() if audit.replays]
    together = [name for name in reading if each[name] <= max(again, LONG)]
    alone = [name for name in chosen if name not in together]
    found = [Step({name: chosen[name]}, each[name] + again * (name in reading), name in reading) for name in alone]
    if together:
        together.sort(key=lambda name: each[name])
        seconds = again + sum(each[name] for name in together)
        found.append(Step({name: chosen[name] for name in together}, seconds, True))
    return sorted(found, key=lambda step: step.seconds)


def replay_seconds(run: Run, population: Partitioned) -> float:
    """Seconds that the rounds of a run may take again, in one process.

    They took as long on as many cores as had work; counts tell where a slow network or a pause made them longer.
    """
    cores = run.experiment.run.workers or int(run.manifest["machine"].get("cores") or 1)
    recorded = float(run.manifest["result"]["seconds"]) * min(cores, max(len(population.clients), 1))
    return max(min(recorded, cost(run, population)), 1.0)


class TimeUpError(KeyboardInterrupt):
    """The time of an audit is up. Like Ctrl-C it passes through the code of clients, which turns errors into faults."""


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
    """Raise :class:`TimeUpError` in the code inside when ``end`` has come.

    Only the main thread can be interrupted; in another one the time is compared before the code begins.
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
    """What does these attacks."""
    return " ".join([f"fedfm audit {path}", *(f"--attack {name}" for name in names)])
