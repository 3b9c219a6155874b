"""A deployment on loopback: a SuperLink, a SuperNode for each client, their executors, and the clients' workers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fedfm.core.text import safe_name
from fedfm.engines.child_processes import Children
from fedfm.engines.flower import client_stub, loopback_keys, program_forks
from fedfm.engines.flower.private_api import OPERATOR, QUICK_EXECUTOR, Control
from fedfm.engines.interruption import Interrupted
from fedfm.errors import RunError

_START = 120.0  # seconds that SuperLink and SuperNodes may take to start
_POLL = 0.1
# Starts Flower's programs with fedfm's changes.
PROGRAMS = (sys.executable, "-m", "fedfm.engines.flower.private_programs")


class Fleet:
    """The processes of a deployment on loopback, the operator's connection to the SuperLink, and the SuperLink's
    host:port.
    """

    def __init__(self, children: Children, control: Control, address: str) -> None:
        self.children, self.control, self.address = children, control, address

    def check(self, notice: Callable[[str], None]) -> None:
        """Report processes that have ended. The run continues without a SuperNode, but not without the SuperLink.

        Raises:
            RunError: the SuperLink or its executor ended.
        """
        for name, how in self.children.reap():
            if name in ("superlink", "superexec", program_forks.NAME):
                raise RunError(f"{name} ended ({how}):\n{self.children.tail(name)}")
            notice(f"{name} ended ({how})")


@contextlib.contextmanager
def loopback(
    folder: Path,
    clients: Sequence[str],
    config: Mapping[str, str],
    stop: Callable[[], bool],
    silos: Mapping[str, Path] | None = None,
) -> Iterator[Fleet]:
    """Context manager: run a SuperLink and its executor, and for each client a SuperNode, an executor and a worker.

    Args:
        folder: for keys, logs and the clients' folders.
        config: the run's configuration that the clients receive.
        stop: called while waiting; True raises :class:`Interrupted`.
        silos: file of each further node, which is a silo with its own rows.

    Raises:
        RunError: a process did not start; the message has the last lines of its log.
    """
    _needs("flwr-serverapp")
    shutil.rmtree(folder / "home", ignore_errors=True)
    loopback_keys.write_certificates(folder)
    children = Children(folder / "logs", environment(folder / "home" / "superlink"))
    sites, ports = folder / "sites", contextlib.ExitStack()
    try:
        port, secret = ports.enter_context(reserve_port()), loopback_keys.write_secret(folder / "superexec.secret")
        address, authority = f"127.0.0.1:{port}", str(folder / "ca.crt")
        forks = program_forks.Forks(children, [*PROGRAMS, "forks", str(folder.resolve())])
        ports.callback(forks.close)
        _workers(config, children, sites, clients)
        forks.start(
            "superlink",
            [
                *("superlink", str(loopback_keys.write_secret(folder / OPERATOR)), "--ssl-ca-certfile", authority),
                *("--ssl-certfile", str(folder / "server.pem")),
                *("--ssl-keyfile", str(folder / "server.key"), "--enable-supernode-auth", "--host", "127.0.0.1"),
                *("--port", str(port), "--disable-runtime-dependency-installation"),
                *("--isolation", "process", "--superexec-auth-secret-file", str(secret)),
            ],
        )
        forks.start(
            "superexec",
            [
                *("server-superexec", "--runtime-api-address", address, "--root-certificates", authority),
                *("--superexec-auth-secret-file", str(secret), "--parent-pid", str(os.getpid())),
            ],
        )
        _until(lambda: _listens(port), children, stop, "the SuperLink does not answer")
        with contextlib.closing(Control(address, folder / "ca.crt")) as control:
            nodes = set()
            where = {c: f"client={json.dumps(c)} site={json.dumps(str(sites.resolve()))}" for c in clients}
            where |= {name: f"silo={json.dumps(str(file.resolve()))}" for name, file in (silos or {}).items()}
            for client, config_of in where.items():
                key = folder / f"node-{safe_name(client)}.key"
                nodes.add(control.register(loopback_keys.write_node_key(key), client))
                _node(forks, folder, client, address, config_of, ports.enter_context(reserve_port()))
            loopback_keys.write_private(folder / "processes.json", json.dumps(children.pids(), indent=1).encode())
            _until(lambda: nodes <= control.online(), children, stop, "a SuperNode does not connect")
            yield Fleet(children, control, address)
    finally:
        children.end()
        ports.close()
        end_workers(sites)
        for file in (silos or {}).values():
            end_workers(file.resolve().parent / ".fedfm" / client_stub.RUNS)
        shutil.rmtree(folder / "home", ignore_errors=True)
        for path in (*folder.glob("*.key"), *folder.glob("*.secret"), folder / "processes.json"):
            path.unlink(missing_ok=True)


def _node(forks: program_forks.Forks, folder: Path, client: str, address: str, config: str, port: int) -> None:
    """Start a SuperNode and its ClientApp's executor. They share a secret, so that no other process gets messages."""
    name = safe_name(client)
    home = str((folder / "home" / name).resolve())
    # Without "node-", a client named "operator" would overwrite the operator's secret.
    secret = loopback_keys.write_secret(folder / f"node-{name}.secret")
    forks.start(
        f"node-{name}",
        [
            *("supernode", "--superlink", address),
            *("--root-certificates", str(folder / "ca.crt")),
            *("--auth-supernode-private-key", str(folder / f"node-{name}.key")),
            *("--host", "127.0.0.1", "--port", str(port), "--node-config", config),
            *("--isolation", "process", "--superexec-auth-secret-file", str(secret)),
        ],
        {"FLWR_HOME": home},
    )
    forks.start(
        f"executor-{name}",
        [
            *("superexec", "--insecure"),
            *("--runtime-api-address", f"127.0.0.1:{port}"),
            *("--superexec-auth-secret-file", str(secret), "--parent-pid", str(os.getpid())),
        ],
        {"FLWR_HOME": home},
    )


def _workers(config: Mapping[str, str], children: Children, sites: Path, clients: Sequence[str]) -> None:
    """Start the clients' workers now, so that they load data and model while SuperLink and SuperNodes start."""
    places: list[Path] = []
    for client in clients:
        node = {"client": client, "site": str(sites.resolve())}
        places.append(client_stub.folder_of(config, node, 0))
        (places[-1] / "site.json").unlink(missing_ok=True)  # a resumed run writes the file again instead of trusting it
        client_stub.prepare(places[-1], config, node)
    if places:
        children.start("workers", [sys.executable, "-m", "fedfm.engines.flower.client_worker", *map(str, places)])


def end_workers(sites: Path) -> None:
    """End workers that a ClientApp started after this process had ended its own workers; remove all sockets."""
    for lock in sites.glob("*/*/worker.lock"):
        if client_stub.running(lock.parent):
            with contextlib.suppress(ValueError, ProcessLookupError):
                os.kill(int(lock.read_text()), 9)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(client_stub.address(lock.parent))


def environment(home: Path) -> dict[str, str]:
    """Environment of every process: its own home folder, no telemetry, and this Python's programs first on the path."""
    return {
        **os.environ,
        **QUICK_EXECUTOR,
        "FLWR_HOME": str(home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FEDFM_PARENT": str(os.getpid()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PATH": _programs(),
    }


def _programs() -> str:
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _needs(program: str) -> None:
    if shutil.which(program, path=_programs()) is None:
        raise RunError(f"{program} is not installed next to {sys.executable}: pip install flwr")


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """Reserve a port on loopback, so that no other program gets it before one of our servers listens on it.

    A socket is bound to the port but does not listen. On Linux a server can still listen on the port if both sockets
    set SO_REUSEADDR. On other systems the port is free at this moment, but another program may take it first.
    """
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if sys.platform == "linux":
            # Set this after the bind, so that the bind itself shares no port.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        else:
            holder.close()
        yield port


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def _until(ready: Callable[[], bool], children: Children, stop: Callable[[], bool], what: str) -> None:
    """Wait until ``ready()`` is true. If a process ends first, raise an error with the last lines of its log."""
    deadline = time.monotonic() + _START
    while not ready():
        for name, how in children.reap():
            if name != "workers":  # the client's answer to the hello says why workers ended
                raise RunError(f"{name} did not start ({how}):\n{children.tail(name)}")
        if stop():
            raise Interrupted
        if time.monotonic() > deadline:
            raise RunError(f"{what} within {_START:g} s; see {children.log('superlink').parent}")
        time.sleep(_POLL)
