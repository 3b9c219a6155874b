"""A silo's ledger: the list of all messages that left the silo in all runs, and the lifetime budgets that it enforces.

The ledger is one JSON-lines file on the silo's own disk. An entry is on the disk before its message leaves. So after a
crash the ledger may count a message that did not leave, but it never lacks a message that left. A crash while an entry
is written leaves an incomplete last line: its message did not leave, and the next process removes the line. Another
file in the silo's own folder, the mark, records how long the ledger was. If the ledger is shorter than that, it is an
older copy or damaged, and the silo sends no message. An absent ledger begins at zero.

A refusal that depends on rows is an answer, so it has a line as well. Budgets are checked before rows are read, so that
a refusal because of a budget does not show whether there would have been an answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedfm.core import storage
from fedfm.core.checks import conform
from fedfm.core.text import to_json
from fedfm.errors import E_REFUSED, ClientFault, InputError, NotWritten, first_line
from fedfm.privacy.composition import Releases, epsilon_of
from fedfm.privacy.policy import TOLERANCE, Budget, Requirements
from fedfm.sites.ledger_mark import forget, lacks_lines

VERSION = 2  # newest version of a line that this module reads; 2 has cost.concentrated
OF_ROWS = ("mean", "reply", "scores", "reveal")  # words of exposure for which an answer counts as a round
ONCE = ("scores", "reveal")  # words for which a silo answers one question per (run, round, handler, part)


@dataclass(frozen=True)
class Cost:
    """The privacy cost of one release; the silo computes it from the experiment.

    Attributes:
        unit: the unit whose presence the noise hides, client or record; "" if there is no noise.
        relation: the neighbouring relation, as in :class:`fedfm.privacy.accountant.Spent`.
        noise_multiplier: z, standard deviation of the noise over the sensitivity; 0 means no noise and no bound.
        rate: probability with which a unit is in each of the ``times`` Gaussian mechanisms of the release.
        by: the party that adds the noise: "silo", or "server" (the silo cannot check the server's noise).
        concentrated: as in :class:`fedfm.privacy.composition.Releases`.
    """

    unit: str = ""
    relation: str = ""
    noise_multiplier: float = 0.0
    rate: float = 1.0
    times: int = 1
    by: str = ""
    concentrated: bool = False

    def releases(self, count: int = 1) -> Releases:
        """Return ``count`` releases of this cost."""
        return Releases(self.noise_multiplier, count * self.times, self.rate, self.concentrated)


UNBOUNDED = Cost()
NOTHING = Cost(times=0)  # the cost of a release that does not depend on rows


@dataclass(frozen=True)
class Entry:
    """One message that left the silo.

    Attributes:
        run, experiment: the run's folder, and the SHA-256 of its experiment's text.
        exposes: hello, mean, reply, scores or reveal.
        part: the part of the rows that the question names, test or val; "" if the handler has no such argument.
        form: the form in which the server receives the message: plain or masked.
        bytes: size of the message, as Flower serialises its records.
        asked: SHA-256 of the question: handler, payload, and the round if the answer may depend on it.
        sha256: SHA-256 of the answer without round and call.
        fault: code of a failure that may depend on rows; "" if there was none. The answer is then a refusal with this
            code, or an empty part of a masked sum.
        epsilon: the epsilon of this release alone, at the budget's delta; None if nothing bounds it.
        version: version of the line; a line without it has version 1.
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
    asked: str = ""
    part: str = ""
    fault: str = ""
    version: int = VERSION


class Totals:
    """Sums over the entries of a ledger.

    If a silo repeats an answer to the same question in the same run, it discloses nothing new: the repetition counts
    as a message and as bytes only. The same answer to another question discloses at least one bit, even if it is a
    refusal.

    Attributes:
        rounds: number of rounds. A round calls each handler once for each part of the rows. If a server repeats a round
            with other parameters, the silo counts one more round. Scores before the first round belong to the first
            round. The messages of secure aggregation do not count as a round.
        faults: number of answers that were refusals, or empty parts of a masked sum.
        again: number of answers to a second question for a mean in one round. An honest server asks a second one only
            after the run was stopped and resumed.
        releases: number of answers for each cost.
        by_run: the same in each run, without answers that nothing bounds.
    """

    def __init__(self) -> None:
        self.messages = self.bytes = self.rounds = self.faults = self.again = 0
        self.releases: Counter[Cost] = Counter()
        self.by_run: defaultdict[str, Counter[Cost]] = defaultdict(Counter)
        self._seen: set[tuple[str, str, str]] = set()
        self._questions: dict[tuple[str, int, str, str], str] = {}  # the first question at each _place
        self._asked: set[tuple[str, str]] = set()
        self._answers: Counter[tuple[str, int, str, str]] = Counter()  # number of answers at each _place
        self._most: Counter[tuple[str, int]] = Counter()  # for each run and round, the largest entry of _answers

    def add(self, entry: Entry) -> None:
        """Count one entry."""
        self.messages += 1
        self.bytes += entry.bytes
        self.faults += bool(entry.fault)
        if self.knows(entry):
            return
        self.again += entry.handler.startswith("train.") and self.another(entry)
        if self.makes_round(entry):
            self.rounds += 1
            self._most[_round(entry)] += 1
        self._answers[_place(entry)] += 1
        self._questions.setdefault(_place(entry), entry.asked)
        self._asked.add((entry.run, entry.asked))
        self._seen.add((entry.run, entry.asked, entry.sha256))
        self.releases[entry.cost] += 1
        if entry.cost.noise_multiplier:
            self.by_run[entry.run][entry.cost] += 1

    def knows(self, entry: Entry) -> bool:
        """Whether this answer to this question has already left the silo in this run."""
        return (entry.run, entry.asked, entry.sha256) in self._seen

    def knows_question(self, entry: Entry) -> bool:
        """Whether this question was answered before in this run."""
        return (entry.run, entry.asked) in self._asked

    def another(self, entry: Entry) -> bool:
        """Whether another question was answered in the same round, by the same handler, on the same part of rows."""
        return self._questions.get(_place(entry), entry.asked) != entry.asked

    def makes_round(self, entry: Entry) -> bool:
        """Whether this answer would count as one more round."""
        if self.knows(entry) or entry.exposes not in OF_ROWS or entry.handler.startswith("aggregate."):
            return False
        return self._answers[_place(entry)] == self._most[_round(entry)]

    def epsilon(self, delta: float, more: Cost = NOTHING, run: str | None = None) -> float:
        """Return the epsilon of all releases and one more together; the epsilons of different units are added.

        Args:
            run: the run whose releases count, without those that nothing bounds; None for all runs.
        """
        units: dict[tuple[str, str], Counter[Releases]] = {}
        known = self.releases if run is None else self.by_run[run]
        for cost, count in (known + Counter([more])).items():
            if cost.times:
                units.setdefault((cost.unit, cost.relation), Counter())[replace(cost.releases(), times=1)] += (
                    count * cost.times
                )
        return math.fsum(
            epsilon_of([replace(one, times=n) for one, n in sorted(found.items(), key=repr)], delta / len(units))
            for found in units.values()
        )


def _place(entry: Entry) -> tuple[str, int, str, str]:
    return entry.run, entry.round, entry.handler, entry.part


def _round(entry: Entry) -> tuple[str, int]:
    """Return the run and the round of an answer; scores of the start model belong to round 1."""
    return entry.run, max(entry.round, 1) if entry.exposes == "scores" else entry.round


class Unusable(ClientFault):
    """The ledger is damaged, is an older copy or cannot be written, so the silo sends no message."""

    def __init__(self, what: str) -> None:
        super().__init__(E_REFUSED, f"the silo's ledger {what}: nothing leaves")


class Ledger:
    """A silo's ledger, shared by the workers of all its runs.

    Args:
        path: the ledger's file; its folder exists.
        budget: the limits on the sums over the entries.
        require: the terms, of which ``largest_epsilon`` limits what the releases of one run spend together.
        mark: another file that records how long the ledger was, so that an older copy is refused; None for no mark.
    """

    def __init__(self, path: Path, budget: Budget, mark: Path | None = None, require: Requirements | None = None):
        self.path, self.budget, self._mark, self._require = path, budget, mark, require or Requirements()
        self._file, self._at = (0, 0), 0
        self._totals, self._sha256 = Totals(), hashlib.sha256()

    def admit(self, entry: Entry) -> None:
        """Check before rows are read whether an answer may leave.

        A repeated question always passes: its answer is the same, and :meth:`enter` checks that.

        Args:
            entry: the answer's entry, as far as it is known.

        Raises:
            ClientFault: with E_REFUSED if the entry would exceed a budget, if its round has already had its only
                question (see :data:`ONCE`), or if the file is damaged or cannot be read.
        """
        with self._current():
            if self._totals.knows_question(entry):
                return
            self._refuse_second(entry)
            if (why := self._exceeded_budget(entry)) is not None:
                raise ClientFault(E_REFUSED, why)

    def enter(self, entry: Entry) -> None:
        """Write an entry to the disk; its message may leave only after this method returns.

        Raises:
            ClientFault: with E_REFUSED if the entry would exceed a budget, or the file is damaged or cannot be written.
                It is also raised if the answer to a repeated question has changed (because the client's own model or
                rows changed) and another question has already been answered in the same round.
        """
        with self._current() as file:
            if (why := self._exceeded_budget(entry)) is not None:
                raise ClientFault(E_REFUSED, why)
            if not (entry.fault or self._totals.knows(entry)):
                self._refuse_second(entry)
            self._append(file, entry)

    def _refuse_second(self, entry: Entry) -> None:
        """Refuse the answer to a second question in a round, if the answer's word of exposure is in :data:`ONCE`.

        Raises:
            ClientFault: E_REFUSED.
        """
        if entry.exposes in ONCE and self._totals.another(entry):
            of = f" on {entry.part} rows" if entry.part else ""
            raise ClientFault(
                E_REFUSED,
                f"round {entry.round} has already had its question for {entry.exposes}{of}: only one is answered",
            )

    @contextmanager
    def _current(self) -> Iterator[int]:
        """A context with the file open and locked, in which all lines of the file are counted.

        Raises:
            Unusable: the file is damaged, is an older copy or cannot be written.
        """
        try:
            with self._alone() as file:
                self._catch_up(file)
                yield file
        except OSError as error:
            raise Unusable(f"cannot be written ({storage.why(error)})") from error
        except InputError:
            raise Unusable("is damaged, or a later version of fedfm wrote it") from None

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """A context with the file open and locked."""
        if new := not self.path.exists():
            forget(self._mark)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if new:
                storage.sync_folder(self.path.parent)
            yield file
        finally:
            os.close(file)

    def _catch_up(self, file: int) -> None:
        """Count the entries that other processes wrote; remove an incomplete last line."""
        status = os.fstat(file)
        if self._file != (status.st_dev, status.st_ino) or status.st_size < self._at:
            self._file, self._at = (status.st_dev, status.st_ino), 0
            self._totals, self._sha256 = Totals(), hashlib.sha256()
        lines, end, torn = os.pread(file, status.st_size - self._at, self._at).rpartition(b"\n")
        if not self._at and lacks_lines(lines + end, self._mark):
            raise Unusable("lacks lines that it had, as an older copy does")
        for entry in [*_entries(lines, self.path)]:  # reads all lines first: if one is damaged, none is counted
            self._totals.add(entry)
        self._at += len(lines) + len(end)
        self._sha256.update(lines + end)
        if torn:
            os.ftruncate(file, self._at)

    def _exceeded_budget(self, entry: Entry) -> str | None:
        """Describe the budget that the entry would exceed; None if it exceeds none."""
        totals, budget = self._totals, self.budget
        if budget.bytes is not None and totals.bytes + entry.bytes > budget.bytes:
            return _over("bytes", totals.bytes, entry.bytes, budget.bytes)
        if budget.rounds is not None and totals.makes_round(entry) and totals.rounds + 1 > budget.rounds:
            return _over("rounds", totals.rounds, 1, budget.rounds)
        if budget.epsilon is not None and entry.cost.times and not totals.knows(entry):
            spent, then = totals.epsilon(budget.delta), totals.epsilon(budget.delta, entry.cost)
            if not then <= budget.epsilon * (1 + TOLERANCE):
                return _over("epsilon", spent, then - spent if then < math.inf else math.inf, budget.epsilon)
        if (most := self._require.largest_epsilon) is not None and entry.cost.noise_multiplier:
            then = totals.epsilon(delta_of(self._require, budget), entry.cost, entry.run)
            if not (totals.knows(entry) or then <= most * (1 + TOLERANCE)):
                return f"require.largest_epsilon = {most:.6g}: this run has spent its epsilon"
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
        self._sha256.update(line)
        if self._mark is not None:  # no sync: after a power failure the mark may be too short, which does no harm
            text = json.dumps({"size": self._at, "sha256": self._sha256.hexdigest()})
            with contextlib.suppress(NotWritten, OSError):
                self._mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                storage.write_atomic(self._mark, text.encode(), 0o600, sync=False)


def _over(key: str, spent: float, more: float, limit: float) -> str:
    return f"budget.{key}: {spent:.6g} of {limit:.6g} is spent, and this answer would spend {more:.6g}"


def delta_of(require: Requirements, budget: Budget) -> float:
    """The delta at which ``largest_epsilon`` is compared: a server that chose delta could give epsilon any value."""
    return budget.delta if require.largest_delta is None else require.largest_delta


def epsilon_alone(cost: Cost, delta: float) -> float | None:
    """Return the epsilon of one release alone; None if nothing bounds it."""
    epsilon = epsilon_of([cost.releases()], delta)
    return epsilon if epsilon < math.inf else None


def entries(path: Path) -> list[Entry]:
    """Read a ledger's entries in order. An incomplete last line is left out, since its message did not leave.

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
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(theirs := found.get("version"), int) and theirs > VERSION:
                raise InputError(
                    f"{path}: line {number} has version {theirs}, and this fedfm reads up to {VERSION}; install the "
                    f"version that wrote it"
                )
            yield conform(found, Entry, "")
        except InputError:
            raise
        except (ValueError, RecursionError, ClientFault) as error:
            raise InputError(f"{path}: line {number} is damaged: {first_line(error)}; put the file back") from None


def now() -> str:
    """Return the present time in the format of the ledger."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
