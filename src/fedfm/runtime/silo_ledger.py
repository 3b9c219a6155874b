"""A silo's ledger: everything that left it, in all runs, and the lifetime budgets that it enforces.

One JSON-lines file on the silo's own disk. An entry is on the disk before its message leaves, so that a crash can count
a message that did not leave, and never the opposite. A crash inside an entry leaves a last line without its end: that
message did not leave, and the next process removes the line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fedfm.core import storage
from fedfm.core.checks import conform
from fedfm.core.text import to_json
from fedfm.errors import E_REFUSED, ClientFault, InputError, first_line
from fedfm.privacy.composition import Releases, epsilon_of
from fedfm.privacy.policy import TOLERANCE, Budget

UPDATES = ("mean", "reply", "reveal")  # words of exposure of which an answer makes a round


@dataclass(frozen=True)
class Cost:
    """The privacy that one release spends, as the silo computes it from the experiment.

    Attributes:
        unit: whose presence is hidden, client or record; "": nobody's.
        relation: which data sets are neighbours, as in :class:`fedfm.privacy.accountant.Spent`.
        noise_multiplier: z, standard deviation of the noise over the sensitivity; 0: no noise, no bound.
        rate: probability with which a unit is in each of the ``times`` Gaussian mechanisms that the release holds.
        by: who adds the noise: "silo", or "server", which the silo cannot check.
    """

    unit: str = ""
    relation: str = ""
    noise_multiplier: float = 0.0
    rate: float = 1.0
    times: int = 1
    by: str = ""


UNBOUNDED = Cost()
NOTHING = Cost(times=0)  # of what does not depend on rows


@dataclass(frozen=True)
class Entry:
    """One message that left.

    Attributes:
        run, experiment: the run's folder, and the SHA-256 of its experiment's text.
        exposes: hello, mean, reply, scores or reveal.
        form: in which the server sees it: plain or masked.
        bytes: of the message, as Flower serialises its records.
        sha256: of the answer without round and call.
        epsilon: of this release alone, at the budget's delta; None: no bound.
    """

    time: str
    run: str
    experiment: str
    round: int
    call: int
    method: str
    handler: str
    exposes: str
    form: str
    bytes: int
    sha256: str
    epsilon: float | None
    cost: Cost


class Totals:
    """Sums over entries.

    An answer that equals an earlier one of its run discloses nothing more: it counts as a message and as bytes only.

    Attributes:
        rounds: a round calls each handler once. A server that repeats a round with other parameters gets another
            answer, which is one more round to the silo. Scores and the messages of secure aggregation make no round.
        releases: how many answers had each cost.
    """

    def __init__(self) -> None:
        self.messages = self.bytes = self.rounds = 0
        self.releases: Counter[Cost] = Counter()
        self._seen: set[tuple[str, str]] = set()
        self._answers: Counter[tuple[str, int, str]] = Counter()  # by run, round and handler
        self._most: Counter[tuple[str, int]] = Counter()  # of the handlers of a round

    def add(self, entry: Entry) -> None:
        """Count one entry."""
        self.messages += 1
        self.bytes += entry.bytes
        if self.knows(entry):
            return
        if self.makes_round(entry):
            self.rounds += 1
            self._most[entry.run, entry.round] += 1
        self._answers[entry.run, entry.round, entry.handler] += 1
        self._seen.add((entry.run, entry.sha256))
        self.releases[entry.cost] += 1

    def knows(self, entry: Entry) -> bool:
        """Whether this answer left before in its run."""
        return (entry.run, entry.sha256) in self._seen

    def makes_round(self, entry: Entry) -> bool:
        """Whether this answer would be one of another round."""
        if self.knows(entry) or entry.exposes not in UPDATES or entry.handler.startswith("aggregate."):
            return False
        return self._answers[entry.run, entry.round, entry.handler] == self._most[entry.run, entry.round]

    def epsilon(self, delta: float, more: Cost = NOTHING) -> float:
        """What all releases spend together, and one more; the epsilons of different units are added."""
        units: dict[tuple[str, str], dict[tuple[float, float], int]] = {}
        for cost, count in (self.releases + Counter([more])).items():
            if cost.times:
                times = units.setdefault((cost.unit, cost.relation), {})
                key = cost.noise_multiplier, cost.rate
                times[key] = times.get(key, 0) + count * cost.times
        return math.fsum(
            epsilon_of([Releases(z, n, rate) for (z, rate), n in sorted(times.items())], delta / len(units))
            for times in units.values()
        )


class Ledger:
    """A silo's ledger, shared by the workers of all its runs.

    Args:
        path: the file; its folder exists.
        budget: what the entries may add up to.
    """

    def __init__(self, path: Path, budget: Budget) -> None:
        self.path, self.budget = path, budget
        self._file, self._at = (0, 0), 0
        self._totals = Totals()

    def enter(self, entry: Entry) -> None:
        """Put an entry on the disk; its message may leave when this returns.

        Raises:
            ClientFault: E_REFUSED, the entry would exceed a budget, or the file is damaged or cannot be written.
        """
        try:
            with self._alone() as file:
                self._catch_up(file)
                if (why := self._exceeded(entry)) is not None:
                    raise ClientFault(E_REFUSED, why)
                self._append(file, entry)
        except OSError as error:
            what = "the disk is full" if storage.full(error) else type(error).__name__
            raise ClientFault(E_REFUSED, f"the silo's ledger cannot be written ({what}): nothing leaves") from error
        except InputError:
            raise ClientFault(E_REFUSED, "the silo's ledger is damaged: nothing leaves") from None

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """The open file, locked."""
        new = not self.path.exists()
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if new:
                storage.sync_folder(self.path.parent)
            yield file
        finally:
            os.close(file)

    def _catch_up(self, file: int) -> None:
        """Count what other processes entered; remove a last line without its end."""
        status = os.fstat(file)
        if self._file != (status.st_dev, status.st_ino) or status.st_size < self._at:
            self._file, self._at, self._totals = (status.st_dev, status.st_ino), 0, Totals()
        lines, end, torn = os.pread(file, status.st_size - self._at, self._at).rpartition(b"\n")
        for entry in [*_entries(lines, self.path)]:  # all are right, or none is counted
            self._totals.add(entry)
        self._at += len(lines) + len(end)
        if torn:
            os.ftruncate(file, self._at)

    def _exceeded(self, entry: Entry) -> str | None:
        """The budget that the entry would exceed, in words; None: none."""
        totals, budget = self._totals, self.budget
        if budget.bytes is not None and totals.bytes + entry.bytes > budget.bytes:
            return _over("bytes", totals.bytes, entry.bytes, budget.bytes)
        if budget.rounds is not None and totals.makes_round(entry) and totals.rounds + 1 > budget.rounds:
            return _over("rounds", totals.rounds, 1, budget.rounds)
        if budget.epsilon is not None and entry.cost.times and not totals.knows(entry):
            spent, then = totals.epsilon(budget.delta), totals.epsilon(budget.delta, entry.cost)
            if not then <= budget.epsilon * (1 + TOLERANCE):
                return _over("epsilon", spent, then - spent if then < math.inf else math.inf, budget.epsilon)
        return None

    def _append(self, file: int, entry: Entry) -> None:
        line = to_json(asdict(entry)).encode() + b"\n"
        try:
            done = 0
            while done < len(line):
                done += os.pwrite(file, line[done:], self._at + done)
            os.fsync(file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, self._at)
            raise
        self._at += len(line)
        self._totals.add(entry)


def _over(key: str, spent: float, more: float, limit: float) -> str:
    return f"budget.{key}: {spent:.6g} of {limit:.6g} is spent, and this answer would spend {more:.6g}"


def epsilon_alone(cost: Cost, delta: float) -> float | None:
    """What one release spends by itself; None: it has no bound."""
    epsilon = epsilon_of([Releases(cost.noise_multiplier, cost.times, cost.rate)], delta)
    return epsilon if epsilon < math.inf else None


def entries(path: Path) -> list[Entry]:
    """What left, in order; a last line without its end did not.

    Raises:
        InputError: a line is damaged.
    """
    try:
        return [*_entries(path.read_bytes().rpartition(b"\n")[0], path)]
    except FileNotFoundError:
        return []


def _entries(lines: bytes, path: Path) -> Iterator[Entry]:
    for number, line in enumerate(lines.splitlines(), 1):
        try:
            yield conform(json.loads(line), Entry, "")
        except (ValueError, RecursionError, ClientFault) as error:
            raise InputError(f"{path}: line {number} is damaged: {first_line(error)}; put the file back") from None


def now() -> str:
    """The time as the ledger writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
