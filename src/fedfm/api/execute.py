"""What the command line and notebooks call: run an experiment, resume a run, load one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.engines.start import start
from fedfm.errors import FedfmError, InputError, RunError
from fedfm.runtime import losses
from fedfm.runtime.population import Partitioned
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run


def run(
    experiment: str | Path | Mapping[str, Any] | Experiment,
    out: str | Path | None = None,
    *,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run an experiment to its end.

    Args:
        experiment: a TOML file, nested tables, or an :class:`Experiment`.
        out: the run directory; by default ``runs/<name>-<time>``.

    Returns:
        The result line as a dict; ``["run"]`` is the run directory.

    Raises:
        InputError: the experiment, its data or its model are wrong; before any computation.
        RunError: the run cannot go on; what was committed is kept and ``resume`` continues it.
        KeyboardInterrupt: stopped after the current client, in a notebook by its stop button; it says how to go on.
    """
    experiment = as_experiment(experiment)
    return drive(Run.create(experiment, Path(out) if out else None), progress or Progress(), fresh=True)


def as_experiment(experiment: str | Path | Mapping[str, Any] | Experiment) -> Experiment:
    """Whatever names an experiment, as one."""
    if isinstance(experiment, Experiment):
        return experiment
    if isinstance(experiment, Mapping):
        return Experiment.from_dict(experiment, imports=True)
    return Experiment.load(experiment)


def resume(path: str | Path, *, progress: Progress | None = None, accept_loss: bool = False) -> dict[str, Any]:
    """Go on with a run after its last committed round; of a finished run, return its result.

    On the local engine the final parameters are, bit for bit, those of the run that was never stopped.

    Args:
        accept_loss: go on although secrets, clients' memories or all checkpoints are damaged or missing. The run then
            ends with other parameters, or draws its noise a second time; ``lost`` in its manifest and its result names
            what it went on without.

    Raises:
        InputError: no run is there; or, as :class:`~fedfm.errors.Lost`, a file that it needs is damaged or missing.
    """
    return drive(load_run(path), progress or Progress(), fresh=False, accept_loss=accept_loss)


def load_run(path: str | Path) -> Run:
    """A run directory: manifest, metrics, result.

    Raises:
        InputError: no run is there.
    """
    return Run.open(path)


def drive(
    run: Run,
    progress: Progress,
    *,
    fresh: bool,
    population: Callable[[], Partitioned] | None = None,
    accept_loss: bool = False,
) -> dict[str, Any]:
    """Run or go on to the end, on the experiment's engine; ``population`` gives data and model that are in memory."""
    if run.manifest["result"] is not None:
        return {**run.manifest["result"], "run": str(run.path)}  # the folder may have been moved
    try:
        with run.lock(), _stop_flag() as stop:
            for notice in losses.settle(run, accept_loss):
                progress.notice(notice)
            result = start(run, stop, progress, population)
    except InputError:
        if fresh and not run.metrics():
            storage.discard(run.path, ("manifest.json", "checkpoint", "private"))
        raise
    except KeyboardInterrupt as error:
        again = (
            f"fedfm.resume({str(run.path)!r})" if population is None else f"the same call, with out={str(run.path)!r}"
        )
        error.args = (f"what was committed is kept; go on with {again}",)
        raise
    except OSError as error:
        if not storage.full(error):
            raise
        where = error.filename or "a temporary file (TMPDIR says where)"
        raise RunError(f"cannot write {where}: the disk is full; what was committed before is kept") from error
    finally:
        progress.finished()
    from fedfm.report import html

    try:
        html.write(run.path)
    except (FedfmError, OSError) as error:  # the result is there; `fedfm report` can be asked again
        progress.notice(f"report.html could not be written: {error}")
    return result


class _stop_flag:
    """Ctrl-C and SIGTERM ask to stop after the current client; a second Ctrl-C stops at once."""

    def __enter__(self) -> Callable[[], bool]:
        self._asked = False
        self._old: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._ask)
        return lambda: self._asked

    def _ask(self, number: int, frame: Any) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nStopping after the current client ...\n")

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


__all__ = ["FedfmError", "Progress", "as_experiment", "drive", "load_run", "resume", "run"]
