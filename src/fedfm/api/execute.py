"""Run an experiment, resume a run, load a run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.config.user_code import fill_from_trainer
from fedfm.core import libraries, storage
from fedfm.data.spec import IN_MEMORY
from fedfm.engines.start import start
from fedfm.errors import FedfmError, InputError, RunError, Terminated, reason_of
from fedfm.models import devices
from fedfm.runtime import row_cache
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.progress import Progress
from fedfm.runtime.progress_bar import Bar
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
        progress: receives the run's events; by default a bar and notices go to stderr; ``fedfm.Progress()`` is silent.

    Returns:
        The result as a dict; ``["run"]`` is the run directory.

    Raises:
        InputError: the experiment, its data or its model are invalid; this is raised before any computation.
        RunError: the run cannot continue; committed rounds are kept, and ``resume`` continues the run.
        KeyboardInterrupt: the user stopped the run, e.g. by a notebook's stop button; the current client has finished.
    """
    if isinstance(experiment, Mapping):
        experiment = Experiment.from_dict(fill_from_trainer(experiment), imports=True)
    elif not isinstance(experiment, Experiment):
        experiment = Experiment.load(experiment)
    return drive(Run.create(experiment, Path(out) if out else None), progress or Bar(), fresh=True)


def resume(
    path: str | Path,
    *,
    progress: Progress | None = None,
    accept_loss: bool = False,
    rounds: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Continue a run after its last committed round, or return the result of a finished run.

    On the local engine the final parameters equal those of a run that was never stopped: bit for bit on a CPU, and on a
    GPU with ``run.deterministic``; otherwise up to rounding.

    Args:
        progress: as in :func:`run`.
        rounds: continue to this number of rounds, also if the run is finished. The parameters are those of a run that
            had this number from the start.
        accept_loss: whether to continue although secrets, clients' memories or all checkpoints are damaged or missing.
            The run then ends with other parameters, or draws its noise a second time. ``lost`` in its manifest and its
            result names the lost files.
        changes: new paths of files, a new address of the server, or a new time limit for clients, e.g.
            ``{"run.folder": "/mnt/stick"}``.

    Raises:
        InputError: there is no run, it cannot have more rounds, or a key may not change. If a file that the run needs
            is damaged or missing, the error is :class:`~fedfm.errors.Lost`.
    """
    from fedfm.runtime.resume_changes import extend, move

    run = load_run(path)
    if (rounds is not None or changes) and run.experiment.data.name == IN_MEMORY:  # checked before the run is changed
        raise InputError(
            f"{run.path}: data and model of this run came from Python; call fedfm.federate(...) again with the "
            "same out, and with more rounds to continue it"
        )
    with run.lock() if rounds is not None or changes else contextlib.nullcontext():
        if rounds is not None:
            extend(run, rounds)
        if changes:
            move(run, changes)
        result = drive(run, progress or Bar(), fresh=False, accept_loss=accept_loss)
    if run.experiment.method.traits.figures_only:
        from fedfm.api import survey_figures

        survey_figures.complete(run.path, progress or Bar())
    return result


def _again(run: Run, population: Callable[[], Partitioned] | None) -> str:
    """Text of the call that continues a run."""
    return f"fedfm.resume({str(run.path)!r})" if population is None else f"the same call, with out={str(run.path)!r}"


def load_run(path: str | Path) -> Run:
    """A run directory: manifest, metrics, result.

    Raises:
        InputError: there is no run.
    """
    return Run.open(path)


def drive(
    run: Run,
    progress: Progress,
    *,
    fresh: bool,
    population: Callable[[], Partitioned] | None = None,
    accept_loss: bool = False,
    silos: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Start or continue a run, up to its end.

    Args:
        population: returns data and model, if they are in memory.
        silos: settings files of silos by name; each silo becomes a node on loopback (deployment engine only).
    """
    if run.manifest["result"] is not None:
        return _result_of_finished(run, progress, accept_loss)
    try:
        with run.lock(), _stop_flag() as stop, devices.restore_determinism(), _discard_if_refused(run, fresh):
            if run.manifest["result"] is not None:  # another process has finished the run since it was opened
                return _result_of_finished(run, progress, accept_loss)
            if run.experiment.run.track:
                from fedfm.runtime.trackers.tracker import with_trackers

                progress = with_trackers(run, progress)
            if not fresh:  # a new run has no files yet
                from fedfm.runtime import missing_files

                for notice in missing_files.settle(run, accept_loss):
                    progress.notice(notice)
            result = start(run, stop, progress, population, silos)
    except KeyboardInterrupt as error:
        error.args = (f"committed rounds are kept; continue with {_again(run, population)}",)
        raise
    except RunError as error:  # str(error) stays unchanged, and a traceback shows the note below it
        error.add_note(f"committed rounds are kept; continue with {_again(run, population)}")
        raise
    except OSError as error:
        if (place := storage.place_of(error, (run.path, *row_cache.places()))) is None:
            raise
        raise storage.not_written(place, error) from error
    except Exception as error:
        from fedfm.core import error_places

        if error_places.line_of_user(error) or not error_places.is_library(error):
            raise  # an error of fedfm or of the user's own code is shown as it is
        raise RunError(f"a library failed: {libraries.describe(error)}") from error
    finally:
        progress.finished()
    from fedfm.reports import html

    try:
        html.renew(run.path)
    except (FedfmError, OSError) as error:  # the result exists, and `fedfm report` can write the page later
        progress.notice(f"report.html could not be written: {reason_of(error)}")
    return result


def _result_of_finished(run: Run, progress: Progress, accept_loss: bool) -> dict[str, Any]:
    """The result of a finished run; without ``accept_loss`` its model must be intact."""
    if not accept_loss:
        from fedfm.runtime import finished_files

        finished_files.refuse_lost(run)
    for text in run.manifest["result"].get("warnings", ()):
        progress.notice(text)
    return {**run.manifest["result"], "run": str(run.path)}  # the folder may have been moved since


@contextlib.contextmanager
def _discard_if_refused(run: Run, fresh: bool) -> Iterator[None]:
    """Context manager: remove the new run if its input is refused before the first round. The caller holds its lock."""
    try:
        yield
    except InputError:
        if fresh and not run.metrics():
            run.discard()
        raise


@contextlib.contextmanager
def _stop_flag() -> Iterator[Callable[[], bool]]:
    """Context manager: Ctrl-C and SIGTERM, or a closed terminal, request a stop after the current client; a second
    signal stops at once.
    """
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) == 2:  # a third one must not stop the cleaning
            raise KeyboardInterrupt
        if len(asked) > 2:
            return
        with contextlib.suppress(OSError):  # the terminal may be closed
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"\nStopping after the current client ...\n")

    main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if main and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    old = {number: signal.signal(number, ask) for number in numbers} if main else {}
    try:
        yield lambda: bool(asked)
    except KeyboardInterrupt:
        if asked and asked[-1] != signal.SIGINT:
            raise Terminated(asked[-1]) from None
        raise
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
