"""A Ray cluster that the user has started: joining it, and what its nodes lack for a run."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.config.paths import KEYS
from fedfm.config.toml import to_toml
from fedfm.core.text import listing
from fedfm.engines.flower import node_probe
from fedfm.engines.flower.private_ray import join_ray
from fedfm.errors import InputError, first_line
from fedfm.models import devices
from fedfm.models.locate import BUILT_IN

KEY = "run.ray_address"
_CONNECT = 5.0  # seconds for a connection to the address
_ANSWER = 10.0  # seconds for an answer
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # the frame that begins a connection of HTTP/2, which Ray uses
_PROBE = 120.0  # seconds for a node to say what it has
# Variables that the nodes' processes get from this one. None of them is a secret.
_KEPT = ("FEDFM_MEMORY", "HF_HUB_OFFLINE", "FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK")
_SET = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}


@dataclass(frozen=True)
class RayNode:
    """A node of a Ray cluster: its id, a name for people, where it listens, and what it offers to all jobs."""

    id: str
    name: str
    place: tuple[str, int]
    cores: int
    gpus: float


@dataclass(frozen=True)
class RayCluster:
    """A cluster that this process has joined.

    Attributes:
        gpus: GPUs for each client; 0 if the run uses none.
        slots: number of clients that run at the same time.
        notices: what the operator should know.
    """

    address: str
    nodes: tuple[RayNode, ...]
    gpus: float
    slots: int
    notices: tuple[str, ...]

    def __str__(self) -> str:
        cores, gpus = sum(n.cores for n in self.nodes), sum(n.gpus for n in self.nodes)
        names = listing(node.name for node in self.nodes)
        devices_ = f"{cores} cores" + (f", {gpus:g} GPUs" if gpus else "")
        return (
            f"Ray cluster {self.address}: {len(self.nodes)} nodes ({names}), {devices_}, {self.slots} clients at once"
        )

    def lost_notifier(self, tell: Callable[[str], None]) -> Callable[[str, str], None]:
        """A function that notifies the operator of a lost node, given the ids of the client and of the node."""

        def tell_of(client: str, node: str) -> None:
            known = next(known for known in self.nodes if known.id == node)
            if not _listens(known.place):  # Ray itself says so only after some seconds
                tell(f"node {known.name} of the Ray cluster is lost; {client} is asked again on another node")

        return tell_of

    def silent(self) -> bool:
        """Whether nothing listens at the cluster's address."""
        return not _listens(_split(self.address))


def _listens(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, _CONNECT).close()
    except OSError:
        return False
    return True


def join(experiment: Experiment, run: Path | None = None) -> RayCluster:
    """Join the cluster of ``run.ray_address``, and check its nodes. The caller must have imported Ray.

    Args:
        run: the run's folder; None if there is none yet.

    Raises:
        InputError: the cluster does not answer, this machine is not a node of it, or a node lacks something.
    """
    import ray

    address = str(experiment.run.ray_address)
    _check_answer(address)
    try:
        join_ray(address, _environment())
    except Exception as error:  # Ray has no common class for these errors
        text = " ".join(str(error).split())
        raise InputError(
            f"{KEY} = {address!r}: {text[:300]} (this machine must be a node, with the same Python and Ray: "
            f"ray start --address={address})",
            key=KEY,
        ) from None
    nodes = _with_names([node for node in ray.nodes() if node["Alive"]])
    gpus = gpus_each(experiment, nodes)
    slots = sum(places(node, gpus) for node in nodes)
    if not slots:
        raise InputError(
            f"{KEY} = {address!r}: no node has a core{' and a GPU' if gpus else ''} for a client; see `ray status`",
            key=KEY,
        )
    slots = min(slots, experiment.run.workers or slots)
    notices = _check_nodes(experiment, nodes, run)
    idle = [node.name for node in nodes if not places(node, gpus)]
    if idle:
        notices.append(
            f"{listing(idle)} of the Ray cluster {'has no GPU' if gpus else 'has no core'} and gets no client"
        )
    return RayCluster(address, tuple(nodes), gpus, slots, tuple(notices))


def places(node: RayNode, gpus: float) -> int:
    """Number of clients that run on a node at the same time, each with one core and ``gpus`` GPUs."""
    return min(node.cores, int(node.gpus / gpus + 1e-9)) if gpus else node.cores


def gpus_each(experiment: Experiment, nodes: Sequence[RayNode]) -> float:
    """GPUs for each client, as :func:`.simulation.shares` has it for one machine; 0 if the run uses none.

    Raises:
        InputError: a client needs more GPUs than a node has.
    """
    device, each = experiment.model.device, experiment.run.gpus_per_client
    most = max((node.gpus for node in nodes), default=0.0)
    if device in ("cpu", "mps") or (device in ("auto", devices.MAP) and not most):
        return 0.0
    each = each or (min(n.gpus for n in nodes if n.gpus) if device == devices.MAP else 1.0)
    if each > most:
        raise InputError(
            f"{KEY}: a client needs {each:g} GPUs, and no node of the Ray cluster has more than {most:g}", key=KEY
        )
    return each


def _split(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        InputError: the address has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise InputError(f"{KEY} = {address!r}: expected host:port, as `ray start --head` prints it", key=KEY)
    return host.strip("[]"), int(port)


def _check_answer(address: str) -> None:
    """Check that something answers at the address as Ray does; Ray itself would wait much longer.

    Raises:
        InputError: it does not.
    """
    try:
        with socket.create_connection(_split(address), _CONNECT) as connection:
            connection.settimeout(_ANSWER)
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
            answer = _SETTINGS if os.environ.get("RAY_USE_TLS") == "1" else connection.recv(len(_SETTINGS))
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(
            f"{KEY} = {address!r}: nothing answers there ({why}); start the cluster with `ray start --head`", key=KEY
        ) from None
    if answer[3:4] != _SETTINGS[3:4]:
        raise InputError(
            f"{KEY} = {address!r}: no Ray cluster is there; expected host:port, as `ray start --head` prints it",
            key=KEY,
        )


def _environment() -> dict[str, str]:
    """Environment of the nodes' processes: few threads, no telemetry, and the user's own modules."""
    own = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), "${PYTHONPATH}"]
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return _SET | kept | {"PYTHONPATH": os.pathsep.join(own)}


def _with_names(found: Sequence[Mapping[str, Any]]) -> list[RayNode]:
    """The nodes with names: the address, with the port if several nodes have one address."""
    places = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in found]
    nodes, addresses = [], [address for address, _ in places]
    for node, (address, port) in zip(found, places, strict=True):
        name, has = address if addresses.count(address) == 1 else f"{address}:{port}", node["Resources"]
        nodes.append(RayNode(node["NodeID"], name, (address, port), int(has.get("CPU", 0)), float(has.get("GPU", 0))))
    return sorted(nodes, key=lambda node: node.name)


def _check_nodes(experiment: Experiment, nodes: Sequence[RayNode], run: Path | None) -> list[str]:
    """Compare every node with this machine; returns notices.

    Raises:
        InputError: a node has other versions, cannot read the rows or the model, or does not share the run's folder.
    """
    names = read_by_clients(experiment)
    token = None
    if run is not None:
        file = run.resolve() / "private" / ".ray"
        token = (str(file), os.urandom(8).hex())
        file.write_text(token[1])
    try:
        found = _ask_nodes(nodes, list(names), token)
        own = node_probe.look(list(names), token)
    finally:
        if token is not None:
            Path(token[0]).unlink(missing_ok=True)
    faults = [f for node in nodes for f in faults_of(node.name, found[node.id], own, names, run)]
    if faults:
        raise InputError("; ".join([f"{KEY}: {faults[0]}", *faults[1:]]), key=KEY)
    processors = {node.name: look["processor"] for node in nodes if not isinstance(look := found[node.id], str)}
    others = [name for name, processor in processors.items() if processor != own["processor"]]
    if not others:
        return []
    return [f"{listing(others)} of the Ray cluster has another kind of processor: results can differ by rounding"]


def _paths(tables: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each file or folder on this machine that an experiment names: its table, its key, and the dotted key."""
    places = [(tables[t], key, f"{t}.{key}") for t, keys in KEYS.items() if t != "run" for key in keys]
    clients = tables["data"].get("clients") or {}
    for table, key, name in [*places, *((clients, client, f"data.clients.{client}") for client in clients)]:
        value = table.get(key)
        if isinstance(value, str) and value not in ("", *BUILT_IN) and Path(value).expanduser().exists():
            yield table, key, name


def for_actors(experiment: Experiment) -> str:
    """The experiment for actors on other machines, whose paths are complete."""
    tables = experiment.for_clients().to_dict()
    for table, key, _ in _paths(tables):
        table[key] = str(Path(table[key]).expanduser().resolve())
    return to_toml(tables)


def read_by_clients(experiment: Experiment) -> dict[str, str]:
    """Key of each file and folder that the clients of an experiment read, by its complete path."""
    found = _paths(experiment.for_clients().to_dict())
    return {str(Path(table[key]).expanduser().resolve()): name for table, key, name in found}


def _ask_nodes(
    nodes: Sequence[RayNode], paths: Sequence[str], token: tuple[str, str] | None
) -> dict[str, dict[str, Any] | str]:
    """What :func:`node_probe.look` finds at each node, or the reason why there is no answer, by the node's id."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(node_probe)  # a node may lack fedfm
    try:
        task = ray.remote(node_probe.look)
        asked = {}
        for node in nodes:
            here = NodeAffinitySchedulingStrategy(node.id, soft=False)
            asked[task.options(num_cpus=0, max_retries=0, scheduling_strategy=here).remote(paths, token)] = node.id
        done, late = ray.wait(list(asked), num_returns=len(asked), timeout=_PROBE)
    finally:
        ray.cloudpickle.unregister_pickle_by_value(node_probe)
    found: dict[str, dict[str, Any] | str] = {asked[ref]: f"did not answer within {_PROBE:g} s" for ref in late}
    for ref in done:
        try:
            found[asked[ref]] = ray.get(ref)
        except ray.exceptions.RayError as error:
            found[asked[ref]] = f"failed: {first_line(error)}"
    for ref in late:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(ref, force=True)
    return found


def faults_of(
    node: str, found: Mapping[str, Any] | str, own: Mapping[str, Any], names: Mapping[str, str], run: Path | None
) -> list[str]:
    """What is wrong with a node, for people.

    Args:
        found: what the node has, or why it did not answer.
        own: what this machine has.
        names: the experiment's key of each path.
    """
    if isinstance(found, str):
        return [f"node {node} {found}"]
    faults = []
    theirs, ours = found["versions"], own["versions"]
    if differ := [name for name in ours if theirs[name] != ours[name]]:
        has = ", ".join(f"{name} {theirs[name]}" if theirs[name] else f"no {name}" for name in differ)
        needs = ", ".join(f"{name} {ours[name]}" for name in differ)
        faults.append(f"node {node} has {has}, and this machine has {needs}: install the same versions on every node")
    for path, key in names.items():
        if found["marks"][path] is None:
            faults.append(f"node {node} cannot read {path} ({key}); every node needs it under this path")
        elif found["marks"][path] != own["marks"][path]:
            faults.append(f"node {node} has another {path} ({key}) than this machine")
    if run is not None and not found["shares"]:
        faults.append(
            f"node {node} cannot write {run.resolve()}: clients keep their memories there, so the run's folder must be "
            "on a disk that all nodes mount; choose another --out"
        )
    return faults
