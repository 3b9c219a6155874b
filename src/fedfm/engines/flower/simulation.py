"""The simulation engine: Flower's own simulation on Ray, for many cores and machines.

The server runs in a thread of this process, the clients in Ray actors; each actor loads rows and model once and keeps
them.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedfm.config.experiment import Experiment
from fedfm.core.wire import flower_records
from fedfm.engines.flower import site
from fedfm.engines.flower.private_api import kill_ray, quiet, simulate, start_ray
from fedfm.engines.flower.reaper import end_all, reaping
from fedfm.engines.flower.server_app import host
from fedfm.errors import ClientFault, MissingExtra
from fedfm.runtime.population import populate

if TYPE_CHECKING:
    from fedfm.runtime.progress import Progress
    from fedfm.runtime.run_directory import Run

_PREFIX = "fedfm-ray"  # of temporary folders, followed by the process that made them
_END = "private/simulation.end"  # in a run: the server has gone, actors that are still at work end themselves
_GRACE = 20.0  # seconds that Flower's threads have to end after the server
# Of this process, an actor, which serves many clients of one run, message after message.
_SITES: dict[str, site.Site] = {}


def start(run: Run, stop: Callable[[], bool], progress: Progress) -> dict[str, Any]:
    """Run to the end under Flower's simulation."""
    spec = run.experiment.run
    workers = spec.workers or os.cpu_count() or 1
    outcome: dict[str, Any] = {}
    population = populate(run.experiment)

    end = run.path / _END
    end.unlink(missing_ok=True)

    def ended(straggling: bool) -> None:
        if straggling:  # Flower waits for every call that has begun, and a call ends with its actor
            end.touch()

    def main(grid: Any, context: Context) -> None:
        try:
            outcome["result"] = host(run, grid, population, stop=stop, progress=progress, slots=workers, ended=ended)
        except BaseException as error:  # told to the caller below: Flower's thread would only print it
            outcome["error"] = error

    app = SimulatedSites(run.experiment.for_clients().to_toml(), str(run.path.resolve()))
    try:
        with _ray(workers, run.path / "private" / "flower.log") as give_up:
            try:
                _watched(lambda: simulate(main, app, len(population.clients)), outcome, give_up)
            except RuntimeError as error:
                outcome.setdefault("error", error)
    finally:
        end.unlink(missing_ok=True)
    if "result" not in outcome:
        raise outcome["error"]
    return dict(outcome["result"])


def _watched(simulate: Callable[[], None], outcome: Mapping[str, Any], give_up: Callable[[], None]) -> None:
    """Run in a thread; what does not end after the server has ended is left behind, for its Ray is dead or deaf."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            simulate()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="flower", daemon=True)
    thread.start()
    deadline = math.inf
    while thread.is_alive():
        thread.join(0.1)
        if outcome and deadline == math.inf:
            deadline = time.monotonic() + _GRACE
        if time.monotonic() > deadline:
            give_up()
            return
    if errors:
        raise errors[0]


class SimulatedSites(ClientApp):  # type: ignore[misc]
    """All clients of a run; Ray carries this object to its actors, which build a site from its two texts."""

    def __init__(self, experiment: str, path: str) -> None:
        super().__init__()
        self.experiment, self.path = experiment, path

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer for the client whose number the node has."""
        here = _site(self.experiment, Path(self.path))
        return reply(here, int(context.node_config["partition-id"]), message)


def reply(here: site.Site, client: str | int, message: Message) -> Message:
    """A site's answer to a Flower message, as one."""
    try:
        halves = flower_records.unpack(message.content)
    except ClientFault:
        halves = ("null", b"")  # the site says what is wrong
    handler = flower_records.handler_of(message.metadata.message_type)
    return Message(flower_records.pack(*here.answer(client, handler, *halves)), reply_to=message)


def answer(
    config: Mapping[str, Any], partition: int, run_id: int, handler: str, head: str, data: bytes
) -> tuple[str, bytes]:
    """For ``flwr run`` on a simulation: the site of the run's configuration, kept by this actor."""
    path = Path(str(config.get("out") or "runs")) / str(config.get("run") or f"run-{run_id}")
    return _site(str(config["experiment"]), path).answer(partition, handler, head, data)


def _site(experiment: str, path: Path) -> site.Site:
    key = f"{path}\n{experiment}"
    if key not in _SITES:
        import torch

        torch.set_num_threads(1)
        if not _SITES:
            threading.Thread(target=_end_with, args=(path / _END,), daemon=True).start()
        _SITES.clear()
        memory = path / "private" / "memory"
        read = partial(Experiment.from_dict, tomllib.loads(experiment), imports=True)
        _SITES[key] = site.of_experiment(read, memory, path)
    return _SITES[key]


def _end_with(end: Path) -> None:
    """An actor's thread: this process ends when the file appears."""
    while not end.exists():
        time.sleep(0.2)
    os._exit(0)


@contextlib.contextmanager
def _ray(workers: int, log: Path) -> Iterator[Callable[[], None]]:
    """Ray and Flower, quiet, with all their files in a folder that goes away; signals stay ours.

    Yields what kills Ray's processes where asking does not help.

    Raises:
        MissingExtra: Ray is not installed.
    """
    _sweep()
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")  # short: Ray makes sockets in it
    settings = {
        "FLWR_HOME": f"{folder}/flwr",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    saved = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        ray = _import_ray()
        with reaping(folder), _our_signals() as again, quiet(log):
            try:
                start_ray(workers, folder)
                again()
                yield kill_ray
            finally:
                ray.shutdown()
    finally:
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        end_all(folder)  # Ray does not wait for the processes that it ends


def _sweep() -> None:
    """Remove what runs that were killed have left."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and path.stat().st_uid == os.getuid():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                shutil.rmtree(path, ignore_errors=True)
            except PermissionError:
                continue  # somebody's, under a number that was ours


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtra('run.engine = "simulation" needs Ray: pip install "fedfm[simulation]"') from None
    return ray


@contextlib.contextmanager
def _our_signals() -> Iterator[Callable[[], None]]:
    """Ray takes SIGTERM for itself; what this gives back takes it again."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    ours = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def again() -> None:
        for number, handler in ours.items():
            signal.signal(number, handler)

    try:
        yield again
    finally:
        again()
