"""The simulation engine: Flower's own simulation on Ray, for many cores and machines.

The server runs in a thread of this process. The clients run in Ray actors, and each actor loads rows and model once.
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

from fedfm.config.cohorts import enough
from fedfm.config.experiment import Experiment
from fedfm.core.wire import flower_records
from fedfm.engines.flower import client_host
from fedfm.engines.flower.orphan_cleanup import end_all, reaping
from fedfm.engines.flower.private_api import kill_ray, quiet, simulate, start_ray
from fedfm.engines.flower.server_app import host
from fedfm.errors import ClientFault, MissingExtra
from fedfm.models import cuda_devices, devices
from fedfm.runtime.population import populate

if TYPE_CHECKING:
    from fedfm.runtime.progress import Progress
    from fedfm.runtime.run_directory import Run

_PREFIX = "fedfm-ray"  # prefix of temporary folders, followed by the id of the process that made them
_END = "private/simulation.end"  # when this file appears in a run, the server has ended and the actors end themselves
_LOOKS = 40  # looks at the list of all nodes without their places; then every node gets a hello
_GRACE = 20.0  # seconds for Flower's threads to end after the server
_HOSTS: dict[str, client_host.ClientHost] = {}  # in an actor: its client host, which serves many clients of one run


def start(run: Run, stop: Callable[[], bool], progress: Progress) -> dict[str, Any]:
    """Run to the end under Flower's simulation."""
    spec = run.experiment.run
    workers = spec.workers or os.cpu_count() or 1
    outcome: dict[str, Any] = {}
    population = populate(run.experiment, server=True)
    enough(run.experiment, population.clients)  # raises before Ray starts
    each, gpus = shares(spec.gpus_per_client, run.experiment.model.device)
    slots = min(workers, len(cuda_devices.visible_to_processes(gpus, each))) if gpus else workers

    end = run.path / _END
    end.unlink(missing_ok=True)

    def end_actors(straggling: bool) -> None:
        if straggling:  # Flower waits for every running call; ending the actor ends its call
            end.touch()

    places: dict[int, int] = {}  # the partition-id of each node, so that only nodes that are asked get a hello

    def main(grid: Any, context: Context) -> None:
        try:
            there = 0
            while not places and there < _LOOKS and not stop():  # Flower makes the nodes while this thread runs
                time.sleep(0.05)
                there += len(set(grid.get_node_ids())) >= len(population.clients)
            nodes = {population.clients[place]: node for node, place in places.items()}
            outcome["result"] = host(
                run, grid, population, stop=stop, progress=progress, slots=slots, on_end=end_actors, nodes=nodes
            )
        except BaseException as error:  # the caller raises it below, since Flower's thread would only print it
            outcome["error"] = error

    app = SimulatedClients(run.experiment.for_clients().to_toml(), str(run.path.resolve()))
    try:
        with _ray(workers, run.path / "private" / "flower.log", len(gpus)) as give_up:
            try:
                _run_watched(lambda: simulate(main, app, len(population.clients), each, places), outcome, give_up)
            except RuntimeError as error:
                outcome.setdefault("error", error)
    finally:
        end.unlink(missing_ok=True)
    if "result" not in outcome:
        raise outcome["error"]
    return dict(outcome["result"])


def shares(each: float | None, device: str) -> tuple[float, list[str]]:
    """The number of GPUs per actor, and the list of this machine's GPUs; (0, []) if the run uses none.

    Without this number Ray would make all GPUs visible to each actor, and all actors would use the first GPU.

    Raises:
        InputError: an actor needs more GPUs than there are.
    """
    import torch

    if not cuda_devices.opens(device) or not torch.cuda.is_available():
        return 0.0, []
    gpus = cuda_devices.visible(os.environ, torch.cuda.device_count())
    each = each or (float(len(gpus)) if device == devices.MAP else 1.0)
    cuda_devices.visible_to_processes(gpus, each)  # raises InputError
    return each, gpus


def _run_watched(simulate: Callable[[], None], outcome: Mapping[str, Any], give_up: Callable[[], None]) -> None:
    """Run the simulation in a thread. If it does not end soon after the server, call ``give_up`` and abandon the
    thread.
    """
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


class SimulatedClients(ClientApp):  # type: ignore[misc]
    """The ClientApp of all clients of a run. Ray sends it to its actors, which build a client host from it."""

    def __init__(self, experiment: str, path: str) -> None:
        super().__init__()
        self.experiment, self.path = experiment, path

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer for the client that has the node's number."""
        here = _host_of(self.experiment, Path(self.path))
        return reply(here, int(context.node_config["partition-id"]), message)


def reply(here: client_host.ClientHost, client: str | int, message: Message) -> Message:
    """A client host's answer to a Flower message."""
    try:
        halves = flower_records.unpack(message.content)
    except ClientFault:
        halves = ("null", b"")  # an empty message; the client answers it with a fault
    handler = flower_records.handler_of(message.metadata.message_type)
    return Message(flower_records.pack(*here.answer(client, handler, *halves)), reply_to=message)


def answer(
    config: Mapping[str, Any], partition: int, run_id: int, handler: str, head: str, data: bytes
) -> tuple[str, bytes]:
    """Answer a message of an app that ``flwr run`` simulates; the run's configuration has the experiment."""
    path = Path(str(config.get("out") or "runs")) / str(config.get("run") or f"run-{run_id}")
    return _host_of(str(config["experiment"]), path).answer(partition, handler, head, data)


def _host_of(experiment: str, path: Path) -> client_host.ClientHost:
    key = f"{path}\n{experiment}"
    if key not in _HOSTS:
        import torch

        torch.set_num_threads(1)
        if not _HOSTS:
            threading.Thread(target=_end_with, args=(path / _END,), daemon=True).start()
        _HOSTS.clear()
        memory = path / "private" / "memory"
        read = partial(Experiment.from_dict, tomllib.loads(experiment), imports=True)
        _HOSTS[key] = client_host.of_experiment(read, memory, path)
    return _HOSTS[key]


def _end_with(end: Path) -> None:
    """Body of an actor's thread: end this process when the file appears."""
    while not end.exists():
        time.sleep(0.2)
    os._exit(0)


@contextlib.contextmanager
def _ray(workers: int, log: Path, gpus: int = 0) -> Iterator[Callable[[], None]]:
    """Run Ray and Flower without output, in a temporary folder, with our signal handlers; yields a function that kills
    Ray.
    """
    _sweep()
    # The path must be short, because Ray makes sockets in it.
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
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
        try:
            import ray  # imported now, because Ray reads the environment at import
        except ImportError:
            raise MissingExtra('run.engine = "simulation" needs Ray: pip install "fedfm[simulation]"') from None
        with reaping(folder), _our_signals() as again, quiet(log):
            try:
                start_ray(workers, folder, gpus)
                again()
                yield kill_ray
            finally:
                ray.shutdown()
    finally:
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        end_all(folder)  # because Ray does not wait until its processes have ended


def _sweep() -> None:
    """Remove the temporary folders of killed runs."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and path.stat().st_uid == os.getuid():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                shutil.rmtree(path, ignore_errors=True)
            except PermissionError:
                continue  # a process of another user now has this id


@contextlib.contextmanager
def _our_signals() -> Iterator[Callable[[], None]]:
    """Keep our signal handlers, since Ray replaces the one for SIGTERM. Yields a function that restores them."""
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
