"""Audits: the base class, the list of all, and running them. A file of this folder with an :class:`Audit` is one."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from fedfm.audits.finding import Finding
from fedfm.audits.replay import Replay, Watch, finished, population_of, replay
from fedfm.config.registry import available
from fedfm.core import storage
from fedfm.core.text import to_json
from fedfm.errors import InputError, close, listed
from fedfm.runtime.run_directory import Run

FILE = "audit.json"
VERDICT = ("name", "question", "verdict", "bound", "contradicts")  # of a finding, in the manifest: no figure of rows
Notice = Callable[[str], None]


class Audit(ABC):
    """Subclass in a file of its own; ``--attack`` takes the file's name.

    Attributes:
        methods: names of the methods whose messages it reads.
        by_default: whether it runs if no attack is named; it then takes seconds only.
        replies: whether it reads ``Replay.seen``, which keeps every reply in memory.
        replays: whether it reads the run's own rounds; else it gets the population only.
    """

    methods: ClassVar[tuple[str, ...]] = ()
    by_default: ClassVar[bool] = True
    replies: ClassVar[bool] = True
    replays: ClassVar[bool] = True

    def reads(self, run: Run) -> bool:
        """Whether it is about runs of this kind."""
        return run.experiment.method_name in self.methods

    def unfit(self, run: Run) -> str | None:
        """Why it does not apply to this run, which it :meth:`reads`; None if it does."""
        return None

    def watch(self, run: Run) -> Watch | None:
        """Observer of the replay's rounds, or None; ``Replay.watched`` has it afterwards."""
        return None

    @abstractmethod
    def findings(self, replay: Replay, notice: Notice, **options: Any) -> list[Finding]:
        """Attack."""


def audits() -> dict[str, Audit]:
    """All audits by name."""
    found = {}
    for name, place in available("audits").items():
        module = place.partition(":")[0]
        for value in vars(import_module(module)).values():
            own = isinstance(value, type) and issubclass(value, Audit) and value.__module__ == module
            if own and value is not Audit:
                found[name] = value()
    return found


def choose(run: Run, names: Sequence[str] = ()) -> dict[str, Audit]:
    """The named audits, or all cheap ones that apply.

    Raises:
        InputError: a name is unknown, its audit does not apply, or none applies; the message lists those that do.
    """
    there, method = audits(), run.experiment.method_name
    known = {name: a for name, a in there.items() if a.reads(run)}
    if not known:
        raise InputError(f"{run.path}: no audit reads this run of {method}; `fedfm audit --help` says which fit what")
    unfit = {name: a.unfit(run) for name, a in known.items()}
    fitting = {name: a for name, a in known.items() if unfit[name] is None}
    for name in names:
        if name not in there:
            raise InputError(f"--attack {name}: expected {listed(fitting)}{close(name, fitting)}")
        why = unfit.get(name) if name in known else f"it does not read the messages of this run of {method}"
        if why is not None:
            instead = f"; attacks on this run: {listed(fitting)}" if fitting else ""
            raise InputError(f"--attack {name}: {why}{instead}")
    if names:
        return {name: known[name] for name in dict.fromkeys(names)}
    if not fitting:
        whys = dict.fromkeys(str(why) for why in unfit.values())
        raise InputError(f"{run.path}: no audit fits this run: {'; '.join(whys)}")
    chosen = {name: a for name, a in fitting.items() if a.by_default}
    if not chosen:
        raise InputError(f"{run.path}: no audit fits this run; name one of {listed(fitting)} with --attack")
    return chosen


def perform(
    path: str | Path,
    names: Sequence[str] = (),
    notice: Notice = lambda text: None,
    *,
    given: Any = None,
    **options: Any,
) -> list[Finding]:
    """Attack a finished run, and add the findings to its ``audit.json``; a new finding replaces one of the same name.

    The manifest gets their verdicts.

    Args:
        names: which attacks [all cheap ones that apply].
        notice: receives texts on progress.
        given: of a run of ``fedfm.federate``, what it was called with: a dict of its arguments for model and rows.
        options: of single attacks, e.g. ``pictures``.

    Raises:
        InputError: the run cannot be replayed, or a named attack does not apply.
    """
    run = finished(path, given)
    if not os.access(run.path, os.W_OK):
        raise InputError(f"{run.path} cannot be written, and an audit keeps its findings there; audit a copy")
    chosen = choose(run, names)
    watches = {name: audit.watch(run) for name, audit in chosen.items()}
    watched = {name: watch for name, watch in watches.items() if watch is not None}
    reading = [audit for audit in chosen.values() if audit.replays]
    if reading:
        again = replay(run, notice, watched, keep=any(audit.replies for audit in reading), given=given)
    else:
        again = Replay(run, population_of(run, given), (), given=given)
    found = []
    for name, audit in chosen.items():
        notice(f"attack: {name}")
        found += audit.findings(again, notice, **options)
    fresh = {f.name for f in found}
    with run.lock(wait=True):  # two audits of a run add to one list
        kept = [f for f in earlier(run.path) if f["name"] not in fresh]
        everything = kept + [f.to_dict() for f in found]
        text = to_json({"run": str(run.path), "findings": everything}, indent=1, ascii=True)
        storage.write_atomic(run.path / FILE, text.encode() + b"\n", 0o600)
        run.manifest["audits"] = [{key: f.get(key) for key in VERDICT} for f in everything]
        run.write_manifest()
    return found


def earlier(path: Path) -> list[dict[str, Any]]:
    """Findings in ``audit.json``; none if the file is missing or invalid."""
    try:
        value = json.loads((path / FILE).read_text(encoding="utf-8"))
        return [f for f in value["findings"] if isinstance(f["name"], str)]
    except (OSError, ValueError, KeyError, TypeError):
        return []
