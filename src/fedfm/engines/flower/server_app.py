"""The server of a run on Flower's Grid, in the simulation's thread or in a ServerApp's process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Context
from flwr.serverapp import Grid

from fedfm.config.cohorts import enough
from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.messages import Excluded
from fedfm.core.method import fraction_of
from fedfm.core.text import visible
from fedfm.core.wire.limits import room
from fedfm.engines import child_processes
from fedfm.engines.flower import run_config
from fedfm.engines.flower.async_link import FlowerStream
from fedfm.engines.flower.link import FlowerLink
from fedfm.engines.flower.private_api import is_simulated
from fedfm.engines.flower.recovery.pending_requests import PendingRequests
from fedfm.engines.flower.recovery.round_replies import RoundReplies
from fedfm.errors import InputError, RunError, lines_of
from fedfm.linalg.threads import torch_threads
from fedfm.runtime import missing_files, row_sums, waiting_file
from fedfm.runtime.client_timeout import patience
from fedfm.runtime.disclosure import tell
from fedfm.runtime.judge import judge
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.population import populate
from fedfm.runtime.progress import Progress
from fedfm.runtime.resume_changes import changed_keys
from fedfm.runtime.run_directory import Run
from fedfm.runtime.run_manifest import describe
from fedfm.runtime.server import Server

OUTCOME = "private/outcome.json"  # the ServerApp's error, for the process that waits for the run
# File in the folder of the runs, with values that clients must not get. The bundle does not contain this file.
SERVER_ONLY = "server-only"
LOCK = "private/server.lock"  # locked while a ServerApp writes the run; has the ids of the process and of Flower's run


class ProgressLines(Progress):
    """Reports progress as lines on standard error, which ``flwr run --stream`` shows."""

    def started(self, run: Run, rounds: int, done: int) -> None:
        self.notice(f"round {done} of {rounds} is done; the run is in {run.path}")

    def round(self, line: Mapping[str, Any]) -> None:
        figures = [f"{key} {line[key]:.3f}" for key in ("accuracy", "perplexity") if line.get(key) is not None]
        self.notice(", ".join([f"round {line['round']}", *figures]))

    def excluded(self, excluded: Excluded) -> None:
        self.notice(str(excluded))

    def notice(self, text: str) -> None:
        """Write one line without control characters, which a silo could put into its name."""
        sys.stderr.write(f"fedfm: {visible(text)}\n")
        sys.stderr.flush()


def host(
    run: Run,
    grid: Grid,
    population: Partitioned | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
    slots: int = 0,
    returns: bool = True,
    on_end: Callable[[bool], None] = lambda straggling: None,
    simulated: bool = False,
) -> dict[str, Any]:
    """Run from the last commit to the end; returns the result.

    Args:
        population: rows and model if they are in memory already.
        slots: number of clients that run at the same time; 0 means all.
        returns: whether nodes may reconnect, as on a network.
        on_end: called at the end, also after an error; its argument is whether clients that timed out may still be
            running.
        simulated: whether any node of the Grid can answer for any client, see :class:`SimulatedClients`.
    """
    watcher = progress or Progress()
    experiment, spec = run.experiment, run.experiment.run

    def note(text: str) -> None:
        run.manifest["notices"].append(text)
        run.write_manifest()
        watcher.notice(text)

    with torch_threads(1):
        population = population or populate(experiment, server=True)
        real = not is_simulated(grid)
        answered = RoundReplies(run.path / "private" / "answered") if real else None
        describe(run, population, watcher)
        outstanding = PendingRequests(run.path / "private") if real and spec.asynchronous is not None else None
        kind: Callable[..., FlowerLink] = FlowerLink
        if outstanding is not None:
            kind = partial(FlowerStream, outstanding=outstanding)
        link = kind(
            grid,
            gather=spec.timeout,
            timeout=patience(experiment.method, population, spec, watcher.notice),
            expected=population.clients,
            identity=population.model.identity,
            most=room(population.model.layout),
            spare=real,
            lazy=fraction_of(experiment.method) < 1,
            simulated=simulated,
            greeting={"classes": list(population.federated.table.classes), **row_sums.known_keys(run, experiment)},
            slots=slots,
            returns=real and returns,
            answered=answered,
            waits=waiting_file.Writer(run.path).tell if real else lambda asked, missing: None,
            min_clients=spec.min_clients or 1,
            known=run.manifest["clients"] if real and returns and run.metrics() else (),
            stop=stop,
            progress=watcher.client,
            notice=note,
        )
        try:
            if link.own_data:
                if experiment.attack is not None:
                    raise InputError("[attack]: silos with their own rows cannot be attackers; drop it")
                if population.model.task.trained_classes is not None:
                    raise InputError("model.base_classes: silos with their own rows train on all classes; drop it")
                run.manifest["clients"] = list(link.clients)
                tell(run, None, [])
                run.write_manifest()
            enough(experiment, link.clients)
            scores = judge(population, experiment.method)
            server = Server(run, link, population.model, judge=scores, progress=watcher)
            link.record(server.fed.transcript.add)
            if link.own_data and row_sums.check_silos(experiment):
                row_sums.agree(run, experiment, server.fed, link.greet, watcher.notice)
            result = server.go()
            for kept in (answered, outstanding):
                if kept is not None:
                    kept.clear()
            return result
        finally:
            on_end(link.straggling)


def _experiment_of(config: Mapping[str, Any], path: Path, grid: Grid) -> Experiment:
    """The experiment of a Flower run's configuration."""
    try:
        tables = run_config.with_paths(run_config.merge_settings(config))
        experiment = Experiment.from_dict(tables, imports=True)
    except InputError as error:
        raise InputError(f"--run-config: {error}") from None
    known = path.parent / SERVER_ONLY
    experiment = experiment.for_server(json.loads(known.read_text()) if known.exists() else {})
    engine = "simulation" if is_simulated(grid) else "deployment"
    return replace(experiment, run=replace(experiment.run, engine=engine, wire=False, workers=0))


def _refuse_other_settings(run: Run, experiment: Experiment) -> None:
    """Refuse to continue a run with other settings: the sites would compute with them, and the server without.

    Raises:
        InputError: the message names the settings.
    """
    if keys := changed_keys(run.experiment.to_dict(), experiment.to_dict()):
        raise InputError(
            f"{run.path}: this run has other values of {', '.join(keys)}, and a run keeps its settings; give another "
            "run-name, or the settings with which it began"
        )


def serve(grid: Grid, context: Context) -> None:
    """Main function of a ServerApp. The configuration names the run directory; an existing run is resumed.

    It raises an error for Flower, and also writes the error to :data:`OUTCOME` for the process that waits for the run.
    """
    child_processes.watch_parent()
    config = context.run_config
    path = run_config.run_folder(config, context.run_id)
    if (path / "manifest.json").exists():
        run = Run.open(path)
        if "key" not in config:  # the app of `fedfm app`; the process that submits another app has the run's settings
            _refuse_other_settings(run, _experiment_of(config, path, grid))
    else:
        run = Run.create(_experiment_of(config, path, grid), path)
    progress = ProgressLines()
    if run.manifest["result"] is not None:
        progress.notice(f"{run.path} has already finished")
        return
    with only_server(run, context.run_id):
        (run.path / OUTCOME).unlink(missing_ok=True)
        try:
            for notice in missing_files.settle(run):
                progress.notice(notice)
            host(run, grid, progress=progress, returns=not config.get("loopback", False))
            progress.notice(f"the run has finished; `fedfm report {run.path}` writes its report")
        except Exception as error:
            # If the SuperLink is away, the waiting process submits the run again.
            if isinstance(error, httpx.HTTPError):
                raise
            kind = "InputError" if isinstance(error, InputError) else "RunError"
            worded = isinstance(error, (InputError, RunError))
            text = "\n".join(lines_of(error)) if worded else f"{type(error).__name__}: {error}"
            outcome = {"run": context.run_id, "kind": kind, "text": text}
            storage.write_atomic(run.path / OUTCOME, json.dumps(outcome).encode(), 0o600)
            raise


@contextlib.contextmanager
def only_server(run: Run, run_id: int, patience: float = 30.0) -> Iterator[None]:
    """Context manager: lock the run for this ServerApp. If a former ServerApp is still ending, wait for it.

    Args:
        run_id: id of Flower's run.
        patience: seconds to wait.

    Raises:
        RunError: another ServerApp does not release the lock.
        InputError: a file of the run is a link.
    """
    run.refuse_links()
    with open(run.path / LOCK, "a", opener=storage.private) as file:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise RunError(f"{run.path}: another ServerApp is writing this run") from None
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"{os.getpid()} {run_id}")
        file.flush()
        yield


def is_served(path: Path, run_id: int) -> bool:
    """Whether the ServerApp of this Flower run is the one that writes the run directory."""
    try:
        return (path / LOCK).read_text().split()[1:] == [str(run_id)] and child_processes.is_locked(path / LOCK)
    except OSError:
        return False
