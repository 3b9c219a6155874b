"""The simulation engine: Flower's own simulation, on a Ray instance of its own, or on a running Ray cluster.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedfm.config.cohorts import enough
from fedfm.config.experiment import Experiment
from fedfm.core.toml_text import to_toml
from fedfm.core.wire import flower_records
from fedfm.engines.flower import base_memory, client_host, run_config
from fedfm.engines.flower.orphan_cleanup import end_all, reaping
from fedfm.engines.flower.private_api import quiet
from fedfm.engines.flower.private_ray import kill_ray, simulate, start_ray
from fedfm.engines.flower.server_app import host
from fedfm.errors import ClientFault, MissingExtra, RunError
from fedfm.models import cuda_devices, devices
from fedfm.runtime.partitioned import trim_heap
from fedfm.runtime.population import populate

if TYPE_CHECKING:
    from fedfm.runtime.partitioned import Partitioned
    from fedfm.runtime.progress import Progress
    from fedfm.runtime.run_directory import Run

_PREFIX = "fedfm-ray"  # prefix of temporary folders, followed by the id of the process that made them
_END = "private/simulation.end"  # when this file appears in a run, the server has ended and the actors end themselves
_LOG = "private/flower.log"
_LOOK = 15.0  # seconds between two looks at whether Ray answers
_GRACE = 20.0  # seconds for Flower's threads to end after the server
_HOSTS: dict[str, client_host.ClientHost] = {}  # in an actor: its client host, which serves many clients of one run


@dataclass(frozen=True)
class _Place:
    """Where the actors of a run are: a Ray instance of this process, or a cluster.

    Attributes:
        slots: number of clients that run at the same time.
        gpus: GPUs per actor.
        text: the experiment for the actors.
        give_up: end a simulation that does not end by itself.
        pool: makes the pool of actors; None for Flower's own.
        silent: whether Ray no longer answers.
    """

    slots: int
    gpus: float
    text: str
    give_up: Callable[[], None] = kill_ray
    pool: Callable[..., Any] | None = None
    silent: Callable[[], bool] = lambda: False


def start(run: Run, stop: Callable[[], bool], progress: Progress) -> dict[str, Any]:
    """Run to the end under Flower's simulation."""
    experiment, outcome = run.experiment, dict[str, Any]()
    end, ended = run.path / _END, threading.Event()
    end.unlink(missing_ok=True)

    def end_actors(straggling: bool) -> None:
        ended.set()
        if straggling:  # Flower waits for every running call; ending the actor ends its call
            end.touch()

    with contextlib.ExitStack() as stack:
        stack.callback(end.unlink, missing_ok=True)
        if experiment.run.ray_address:  # checks the nodes before the rows are read
            place = stack.enter_context(_join_cluster(run, ended, progress.notice))
        population = populate(experiment, server=True)
        enough(experiment, population.clients)  # raises before Ray starts here
        if not experiment.run.ray_address:
            place = stack.enter_context(_start_own(run))

        def main(grid: Any, context: Context) -> None:
            try:
                outcome["result"] = host(
                    run,
                    grid,
                    population,
                    stop=lambda: ended.is_set() or stop(),
                    progress=progress,
                    slots=place.slots,
                    on_end=end_actors,
                    simulated=True,
                )
            except BaseException as error:  # the caller raises it below, since Flower's thread would only print it
                outcome["error"] = error

        app = SimulatedClients(place.text, str(run.path.resolve()))
        try:
            nodes = len(population.clients)
            _run_watched(lambda: simulate(main, app, nodes, place.gpus, place.pool), outcome, place, ended)
        except RuntimeError as error:
            outcome.setdefault("error", error)
    if "result" not in outcome:
        raise outcome["error"]
    return dict(outcome["result"])


@contextlib.contextmanager
def _start_own(run: Run) -> Iterator[_Place]:
    """Run Ray on this machine."""
    spec = run.experiment.run
    workers = spec.workers or os.cpu_count() or 1
    each, gpus = shares(spec.gpus_per_client, run.experiment.model.device)
    slots = min(workers, len(cuda_devices.visible_to_processes(gpus, each))) if gpus else workers
    with _ray(workers, run.path / _LOG, len(gpus)):
        yield _Place(slots, each, run.experiment.for_clients().to_toml())


@contextlib.contextmanager
def _join_cluster(run: Run, ended: threading.Event, notice: Callable[[str], None]) -> Iterator[_Place]:
    """Join the cluster of ``run.ray_address``, and leave it running at the end."""
    with ray_session(run.path / _LOG) as again:
        from fedfm.engines.flower import actor_pool, ray_cluster

        cluster = ray_cluster.join(run.experiment, run.path)
        again()

        def tell(text: str) -> None:
            run.manifest["notices"].append(text)
            notice(text)

        for text in cluster.notices:
            tell(text)
        pool = partial(
            actor_pool.ActorPool, capacity=cluster.slots, lost=cluster.lost_notifier(tell), closed=ended, notice=tell
        )
        text = ray_cluster.for_actors(run.experiment)
        yield _Place(cluster.slots, cluster.gpus, text, lambda: None, pool, cluster.silent)


def describe_cluster(experiment: Experiment) -> list[str]:
    """Join the cluster of ``run.ray_address`` and check its nodes; returns what was found and notices.

    Raises:
        InputError: there is no cluster, or a node lacks something.
    """
    with ray_session(Path(os.devnull)):
        from fedfm.engines.flower import ray_cluster

        cluster = ray_cluster.join(experiment)
        return [str(cluster), *cluster.notices]


def shares(each: float | None, device: str) -> tuple[float, list[str]]:
    """The number of GPUs per actor, and the list of this machine's GPUs; (0, []) if the run uses none.

    Without this number Ray would make all GPUs visible to each actor, and all actors would use the first GPU.

    Raises:
        InputError: an actor needs more GPUs than there are.
    """
    import torch

    if not cuda_devices.opens_accelerator(device) or not torch.cuda.is_available():
        return 0.0, []
    gpus = cuda_devices.visible(os.environ, torch.cuda.device_count())
    each = each or (float(len(gpus)) if device == devices.MAP else 1.0)
    cuda_devices.visible_to_processes(gpus, each)  # raises InputError
    return each, gpus


def _run_watched(simulate: Callable[[], None], outcome: dict[str, Any], place: _Place, ended: threading.Event) -> None:
    """Run the simulation in a thread. If it does not end soon after the server, give it up and abandon the thread.

    If Ray is silent, ``ended`` is set, which stops the server, and the outcome is an error.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            simulate()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="flower", daemon=True)
    thread.start()
    deadline, look = math.inf, time.monotonic() + _LOOK
    while thread.is_alive():
        thread.join(0.1)
        if not ended.is_set() and time.monotonic() > look:
            look = time.monotonic() + _LOOK
            if place.silent():
                ended.set()
                thread.join(_GRACE)
                text = "the Ray cluster no longer answers; start it again, and continue with `fedfm resume`"
                outcome["error"] = RunError(text)
                return
        if outcome and deadline == math.inf:
            deadline = time.monotonic() + _GRACE
        if time.monotonic() > deadline:
            place.give_up()
            return
    if errors:
        raise errors[0]


class SimulatedClients(ClientApp):  # type: ignore[misc]
    """The ClientApp of all clients of a run. Ray sends it to its actors, which build a client host from it."""

    def __init__(self, experiment: str, path: str) -> None:
        super().__init__()
        self.experiment, self.path = experiment, path

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer for the client that the message names: an actor has all clients, so the node's number says nothing."""
        return reply(_host_of(self.experiment, Path(self.path)), message.metadata.group_id, message)


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
    path, text = run_config.run_folder(config, run_id), to_toml(run_config.with_paths(config))
    return _host_of(text, path).answer(partition, handler, head, data)


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
        _HOSTS[key] = client_host.of_experiment(read, memory, path, load=partial(_populate, key))
    return _HOSTS[key]


def _populate(name: str, experiment: Experiment) -> Partitioned:
    """Rows and model, which share the memory of frozen weights with the other actors of this machine."""
    population = populate(experiment)
    if population.client_model is not None and base_memory.share(population.client_model.module, name):
        trim_heap()  # frees the copies that the shared file has replaced
    return population


def _end_with(end: Path) -> None:
    """Body of an actor's thread: end this process when the file appears."""
    while not end.exists():
        time.sleep(0.2)
    os._exit(0)


@contextlib.contextmanager
def _ray(workers: int, log: Path, gpus: int) -> Iterator[None]:
    """Run Ray and Flower in a temporary folder."""
    folder = _folder()
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        with _prepare(folder, log, PYTHONPATH=path) as again, reaping(folder):
            import ray

            try:
                start_ray(workers, folder, gpus)
                again()
                yield
            finally:
                ray.shutdown()
    finally:
        end_all(folder)  # because Ray does not wait until its processes have ended


@contextlib.contextmanager
def ray_session(log: Path) -> Iterator[Callable[[], None]]:
    """Prepare this process to join a Ray cluster, and leave the cluster at the end; yields a function that restores our
    signal handlers.
    """
    folder = _folder()
    try:
        with _prepare(folder, log) as again:
            import ray

            try:
                yield again
            finally:
                ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _folder() -> str:
    """A new temporary folder; its path must be short, because Ray makes sockets in it."""
    _sweep()
    return tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")


@contextlib.contextmanager
def _prepare(folder: str, log: Path, **more: str) -> Iterator[Callable[[], None]]:
    """Import Ray and keep it and Flower without output, with our signal handlers; yields a function that restores them.

    Raises:
        MissingExtra: Ray is not installed.
    """
    settings = more | {
        "FLWR_HOME": f"{folder}/flwr",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_ENABLE_AUTO_CONNECT": "0",  # a late thread of Flower would start another Ray
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
    }
    saved = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        try:
            import ray  # noqa: F401 - imported now, because Ray reads the environment at import
        except ImportError:
            raise MissingExtra('run.engine = "simulation" needs Ray: pip install "fedfm[simulation]"') from None
        with _our_signals() as again, quiet(log):
            yield again
    finally:
        for name, value in saved.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


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
