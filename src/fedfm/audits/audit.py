"""Audits: their base class, the list of all audits, and how audits are run.

Each file of this folder that contains a subclass of :class:`Audit` is an audit.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import isabstract
from pathlib import Path
from typing import Any, ClassVar

from fedfm.audits import findings_file
from fedfm.audits.finding import Finding
from fedfm.audits.replay import Replay, Watch, check_unchanged, open_finished, population_of, replay
from fedfm.audits.steps import Step, TimeUpError, command, deadline, steps, until
from fedfm.config.registry import available
from fedfm.core import storage
from fedfm.core.durations import duration_text
from fedfm.core.text import to_json
from fedfm.errors import InputError, RunError, close, quote_names
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.progress import AuditProgress
from fedfm.runtime.run_directory import Run

VERDICT = ("name", "question", "verdict", "bound", "contradicts")  # fields of a finding that the manifest repeats
Notice = Callable[[str], None]


class Audit(ABC):
    """Base class of audits. Each audit has its own file, whose name is the value of ``--attack``.

    Attributes:
        methods: names of the methods whose messages the audit reads.
        by_default: whether the audit runs if the user names no attack; such an audit takes only seconds.
        replies: whether the audit reads ``Replay.replies``; if so, all replies are kept in memory.
        replays: whether the audit needs a replay of the run's rounds; if not, it only gets the clients' rows and the
            model.
        takes: seconds that the audit may take after the replay, if this time does not depend on the run.
    """

    methods: ClassVar[tuple[str, ...]] = ()
    by_default: ClassVar[bool] = True
    replies: ClassVar[bool] = True
    replays: ClassVar[bool] = True
    takes: ClassVar[float] = 2.0

    def seconds(self, run: Run, population: Partitioned) -> float:
        """Seconds that the audit may take on one core, not counting the replay of the run."""
        return self.takes

    def reads(self, run: Run) -> bool:
        """Whether the audit can read runs of this kind, e.g. of this method."""
        return run.experiment.method_name in self.methods

    def why_unread(self, run: Run) -> str:
        """Why :meth:`reads` is false for this run; by default it is for the run's method."""
        return f"it does not read the messages of {run.experiment.method_name}"

    def unfit(self, run: Run) -> str | None:
        """Why the audit does not apply to this run, although it :meth:`reads` runs of this kind; None if it applies."""
        return None

    def watch(self, run: Run) -> Watch | None:
        """An observer of the replay's rounds, or None. After the replay, ``Replay.watched`` has the observer."""
        return None

    @abstractmethod
    def findings(self, replay: Replay, notice: Notice, **options: Any) -> list[Finding]:
        """Attack the run; return the findings."""


def audits() -> dict[str, Audit]:
    """All audits by name."""
    found = {}
    for name, place in available("audits").items():
        module = place.partition(":")[0]
        for value in vars(import_module(module)).values():
            own = isinstance(value, type) and issubclass(value, Audit) and value.__module__ == module
            if own and not isabstract(value):
                found[name] = value()
    return found


def choose(run: Run, names: Sequence[str] = ()) -> dict[str, Audit]:
    """The audits of these names; without names, all cheap audits that apply.

    Raises:
        InputError: a name is unknown, its audit does not apply, or no audit applies. The error lists audits that apply.
    """
    there = audits()
    known = {name: a for name, a in there.items() if a.reads(run)}
    if not known:
        raise InputError(
            f"{run.path}: no audit reads runs of {run.experiment.method_name}; `fedfm audit --help` lists the runs "
            "that each audit reads"
        )
    unfit = {name: a.unfit(run) for name, a in known.items()}
    fitting = {name: a for name, a in known.items() if unfit[name] is None}
    for name in names:
        if name not in there:
            raise InputError(f"--attack {name}: expected {quote_names(fitting)}{close(name, fitting)}")
        why = unfit.get(name) if name in known else there[name].why_unread(run)
        if why is not None:
            instead = f"; attacks on this run: {quote_names(fitting)}" if fitting else ""
            raise InputError(f"--attack {name}: {why}{instead}")
    if names:
        return {name: known[name] for name in dict.fromkeys(names)}
    if not fitting:
        whys = dict.fromkeys(str(why) for why in unfit.values())
        raise InputError(f"{run.path}: no audit fits this run: {'; '.join(whys)}")
    chosen = {name: a for name, a in fitting.items() if a.by_default}
    if not chosen:
        raise InputError(f"{run.path}: no audit fits this run; name one of {quote_names(fitting)} with --attack")
    return chosen


@dataclass(frozen=True)
class Audited:
    """The result of an audit: its findings, and the attacks that it skipped.

    Attributes:
        findings: findings of the attacks that finished.
        left_out: names of chosen attacks that did not run, because the time limit was reached.
        seconds: estimated seconds of the attacks in ``left_out``.
    """

    findings: list[Finding]
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0


def perform(
    path: str | Path,
    names: Sequence[str] = (),
    notice: Notice = lambda text: None,
    *,
    given: Any = None,
    **options: Any,
) -> list[Finding]:
    """Attack a finished run without a time limit; arguments, effects and errors are as in :func:`perform_within`."""
    return perform_within(None, path, names, notice, given=given, **options).findings


def perform_within(
    limit: float | None,
    path: str | Path,
    names: Sequence[str] = (),
    notice: Notice = lambda text: None,
    *,
    progress: AuditProgress | None = None,
    given: Any = None,
    **options: Any,
) -> Audited:
    """Attack a finished run, and add the findings to its ``audit.json``.

    A new finding replaces an old finding of the same name. The verdicts are also written to the run's manifest. Both
    files are written after each step, so Ctrl-C loses no finding.

    Args:
        limit: seconds after which the running attack is stopped [no limit].
        names: names of the attacks [all cheap attacks that apply].
        notice: receives texts about the progress.
        progress: its methods are called for each attack.
        given: only for a run of ``fedfm.federate``: a dict with that call's arguments for the model and the rows.
        options: options of single attacks, e.g. ``pictures``.

    Raises:
        InputError: the run cannot be replayed, or a named attack does not apply.
        RunError: the time limit was reached before the first finding.
    """
    end, progress = deadline(limit), progress or AuditProgress()
    run = open_finished(path, given)
    if not os.access(run.path, os.W_OK):
        raise InputError(f"{run.path} cannot be written, but an audit writes its findings there; audit a copy")
    chosen = choose(run, names)
    found, waiting, seconds = dict[str, list[Finding]](), list(chosen), 0.0
    try:
        with until(end):
            notice("reading data and model")
            population = population_of(run, given)
            check_unchanged(run, population)
        planned = steps(run, population, chosen)
        seconds = sum(step.seconds for step in planned)
        waiting = [name for step in planned for name in step.names]
        notice(f"{len(chosen)} attack{'s' * (len(chosen) != 1)}, about {duration_text(seconds)}, the cheap ones first")
        progress.started(len(chosen))
        for step in planned:
            for name, findings in _run_attacks(step, chosen, run, notice, progress, end, given, options):
                found[name] = findings
                waiting.remove(name)
                _keep(run, _in_order(found, chosen))
            seconds -= step.seconds
    except TimeUpError:
        assert limit is not None  # noqa: S101 - nothing else raises it
        if not found:
            whole = f"; all {len(chosen)} attacks may take {duration_text(seconds)}" if seconds else ""
            raise RunError(f"{path}: no attack ended within {limit:g} s{whole}; give a longer --time-limit") from None
    except KeyboardInterrupt as stopped:
        if found:
            kept = f"the findings of {', '.join(found)} are kept"
            stopped.args = (f"{kept}; for the other attacks run: {command(path, waiting)}",)
        raise
    finally:
        progress.finished()
    return Audited(_in_order(found, chosen), tuple(waiting), seconds if waiting else 0.0)


def _in_order(found: Mapping[str, list[Finding]], chosen: Iterable[str]) -> list[Finding]:
    """The findings, in the order in which the user named the attacks."""
    return [f for name in chosen for f in found.get(name, ())]


def _run_attacks(
    step: Step,
    chosen: Mapping[str, Audit],
    run: Run,
    notice: Notice,
    progress: AuditProgress,
    end: float | None,
    given: Any,
    options: Mapping[str, Any],
) -> Iterator[tuple[str, list[Finding]]]:
    """For each attack of a step, its name and its findings."""
    attacks = {name: chosen[name] for name in step.names}
    names, several = ", ".join(attacks), len(attacks) > 1
    progress.begins(names, step.seconds)
    if several:
        notice(f"replaying the run, with a recorder at the server, for {names}: about {duration_text(step.seconds)}")
    else:
        notice(f"attack: {names}, about {duration_text(step.seconds)}")
    watches = {name: audit.watch(run) for name, audit in attacks.items()}
    watched = {name: watch for name, watch in watches.items() if watch is not None}
    with until(end):
        if step.replays:
            keep = any(audit.replies for audit in attacks.values())
            again = replay(run, notice, watched, keep=keep, given=given)
        else:
            again = Replay(run, None, (), given=given)
    for name, audit in attacks.items():
        if several:
            progress.begins(name, step.seconds)
            notice(f"attack: {name}")
        with until(end):
            findings = audit.findings(again, notice, **options)
        progress.done()
        yield name, findings


def _keep(run: Run, found: Sequence[Finding]) -> None:
    """Write these findings to the run's files, in addition to findings of earlier audits of the same model."""
    fresh = {f.name for f in found}
    with run.lock(wait=True):  # another audit of the run may add findings at the same time
        of = run.manifest["result"]["params_sha256"]
        everything = [f for f in earlier(run.path, of) if f["name"] not in fresh] + [f.to_dict() for f in found]
        text = to_json({"run": str(run.path), "params_sha256": of, "findings": everything}, indent=1, ascii=True)
        storage.write_atomic(run.path / findings_file.FILE, text.encode() + b"\n", 0o600)
        run.manifest["audits"] = [{key: f.get(key) for key in VERDICT} for f in everything]
        run.write_manifest()


def earlier(path: Path, of: str | None = None) -> list[dict[str, Any]]:
    """Findings in ``audit.json``; empty if it is missing, invalid, or about parameters whose hash is not ``of``."""
    content = findings_file.read(path) or {}
    if of is not None and not findings_file.is_about(content, of):  # the run was continued after that audit
        return []
    return [dict(f) for f in findings_file.findings(content) if isinstance(f.get("name"), str)]
