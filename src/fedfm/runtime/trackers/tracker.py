"""The interface of experiment trackers, and a Progress that passes data on to them."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, ClassVar

from fedfm.core.messages import Excluded
from fedfm.core.toml_text import leaves
from fedfm.errors import InputError, first_line
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run


class Tracker(ABC):
    """One tracking service. A subclass imports its library when it is instantiated.

    Attributes:
        extra: name of the extra of fedfm that installs the library.
    """

    extra: ClassVar[str]

    @abstractmethod
    def start(self, run: Run, done: int) -> int:
        """Open the run, or continue it after ``done`` rounds; return the service's last round, or -1 for none."""

    @abstractmethod
    def log(self, t: int, figures: Mapping[str, float]) -> None:
        """Log the figures of round t."""

    @abstractmethod
    def finish(self, run: Run, result: Mapping[str, Any] | None) -> None:
        """Close the run. If there is no result, the run was stopped, and a resume may continue it."""


class Tracked(Progress):
    """Passes every callback on to a progress display and to the trackers.

    The run does not depend on trackers. If a tracker fails, the run gives a notice and calls that tracker no more.
    """

    def __init__(self, progress: Progress, trackers: Mapping[str, Tracker]) -> None:
        self._progress, self._trackers = progress, dict(trackers)
        self._run: Run | None = None
        self._started: set[str] = set()

    def started(self, run: Run, rounds: int, done: int) -> None:
        self._progress.started(run, rounds, done)
        self._run = run
        for name, tracker in list(self._trackers.items()):
            if self._try(name, self._begin, tracker, run, done):
                self._started.add(name)

    def client(self) -> None:
        self._progress.client()

    def round(self, line: Mapping[str, Any]) -> None:
        self._progress.round(line)
        for name, tracker in list(self._trackers.items()):
            self._try(name, tracker.log, line["round"], figures(line))

    def excluded(self, excluded: Excluded) -> None:
        self._progress.excluded(excluded)

    def notice(self, text: str) -> None:
        self._progress.notice(text)

    def finished(self) -> None:
        self._progress.finished()
        run = self._run
        if run is None:
            return
        try:  # another process may have written the result
            result = json.loads((run.path / "manifest.json").read_text(encoding="utf-8"))["result"]
        except (OSError, ValueError, KeyError):
            result = None
        for name, tracker in list(self._trackers.items()):
            if name in self._started:
                self._try(name, tracker.finish, run, result)

    def _begin(self, tracker: Tracker, run: Run, done: int) -> None:
        """Open the run in a tracker, and log committed rounds that the tracker lacks because a process was killed."""
        known = tracker.start(run, done)
        for line in run.metrics():
            if known < line["round"] <= done:
                tracker.log(line["round"], figures(line))

    def _try(self, name: str, act: Any, *given: Any) -> bool:
        try:
            act(*given)
            return True
        except Exception as error:
            self._trackers.pop(name, None)
            self._progress.notice(f"{name} stops tracking this run: {type(error).__name__}: {first_line(error)}")
            return False


def with_trackers(run: Run, progress: Progress) -> Progress:
    """Return the progress display, extended by the trackers that ``run.track`` names.

    Raises:
        InputError: a library is missing; the error names the extra that installs it.
    """
    names = run.experiment.run.track
    return Tracked(progress, {name: open_tracker(name) for name in dict.fromkeys(names)}) if names else progress


def open_tracker(name: str) -> Tracker:
    """Make the tracker of this name.

    Raises:
        InputError: the tracker's library is missing.
    """
    module = import_module(f"fedfm.runtime.trackers.to_{name}")
    own = (v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Tracker) and v is not Tracker)
    kind: type[Tracker] = next(own)
    try:
        return kind()
    except ImportError as error:
        raise InputError(
            f'run.track: {name} is not installed ({first_line(error)}); `pip install "fedfm[{kind.extra}]"`'
        ) from error


def figures(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers in a line of metrics.jsonl; a client's accuracy is ``client_accuracy/<client>``."""
    found = {name: value for name, value in _flat("", line) if name != "round"}
    found["excluded"] = float(len(line.get("excluded") or ()))
    return found


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{prefix}/{to_metric_name(key)}" if prefix else to_metric_name(key), inner)
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield prefix, float(value)


def to_metric_name(key: str) -> str:
    """Return a name that all services accept: characters except letters, digits, ``_ - .`` and spaces become ``_``."""
    return re.sub(r"[^\w\-. ]", "_", str(key), flags=re.ASCII)


def settings(run: Run) -> dict[str, str]:
    """Return the experiment's settings as texts by dotted key, with fedfm's version and the run directory."""
    given = ((".".join(keys), value) for keys, value in leaves(run.manifest["experiment"]) if value is not None)
    found = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given}
    found |= {"fedfm": str(run.manifest["fedfm"]), "run": str(run.path.resolve())}
    return found


def models(run: Run, result: Mapping[str, Any]) -> dict[str, str]:
    """Return the folders of the final models, and their round (under ``run.patience`` the best, else the last).

    If the best round is not the last round, ``last_model`` names the model of the last round.
    """
    found = {"model_of_round": str(result.get("details", {}).get("model_of_round", result["rounds"]))}
    for name, root in (("model", run.path), ("last_model", run.path / "last")):
        if (root / "adapter").exists():
            found[name] = str((root / "adapter").resolve())
        for folder in sorted(root.glob("clients/*/adapter")):
            found[f"{name}.{to_metric_name(folder.parent.name)}"] = str(folder.resolve())
    return found
