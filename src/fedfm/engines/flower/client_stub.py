"""The ClientApp's side of a client: it sends a message's bytes to the client's worker, and receives the reply's bytes.

Flower starts a new process for every message. If that process imported torch and loaded a model, each message would
take 10 s and more. So the process only exchanges bytes with the client's worker process over a Unix socket, and starts
the worker if it is not running. This module imports no large library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.core.text import complain, safe_name
from fedfm.engines.child_processes import cause, is_locked
from fedfm.engines.flower.run_config import LONGEST, RUN
from fedfm.errors import E_DIED, E_EXCEPTION, E_EXPERIMENT, E_REFUSED, ClientFault, InputError

_HEADER = struct.Struct("<III Q")  # lengths of client, handler, head and data
_LIMIT = 1 << 30  # largest value of each of the first three lengths, in bytes
_PATH = 100  # longest address of a socket, in bytes
_START = 120.0  # seconds for a worker to start listening
_TRIES = 3  # attempts to start a worker if workers end before they listen
_FLOWER = "flower.json"  # in a run's folder: Flower's ids of node and run
END = "worker.end"  # sent in place of a handler's name; it asks the worker to end
DISK = "the client cannot write its records, so it sends no reply; its own log names the file"
RUNS = "runs"  # folder of all runs. The silo's own files are elsewhere, since the server chooses the names of runs
NO_SILO = "this node has no silo.toml; start its SuperNode with --node-config 'silo=\"/path/to/silo.toml\"'"


def folder_of(config: Mapping[str, Any], node: Mapping[str, Any], run_id: int) -> Path:
    """The folder of this client and this run. It contains socket, lock, the client's memory and its errors.

    It is below ``site`` of the node's configuration, or else below ``.fedfm`` in the folder of the silo's file.

    Raises:
        ClientFault: the node's configuration has neither ``site`` nor ``silo``.
    """
    if node.get("site"):
        root = Path(str(node["site"]))
    elif node.get("silo"):
        root = Path(str(node["silo"])).expanduser().resolve().parent / ".fedfm"
    else:
        raise ClientFault(E_REFUSED, NO_SILO)
    key = str(config.get("key") or "")
    if not key:  # without a key, another experiment may use the same run name
        digest = hashlib.sha256(str(config.get("experiment")).encode(errors="surrogatepass")).hexdigest()
        key = f"{config.get(RUN) or run_id}-{digest[:8]}"
    if node.get("silo"):
        return root / RUNS / safe_name(key) / "silo"
    return root / safe_name(key) / safe_name(str(node.get("client")))


def silo_folder(folder: Path) -> Path:
    """The silo's own folder, which serves all runs. ``folder`` is the folder of one run."""
    return folder.parents[2]


def prepare(folder: Path, config: Mapping[str, Any], node: Mapping[str, Any]) -> None:
    """Write ``site.json``, the worker's configuration. An existing file stays, so later messages cannot change it.

    A deployment on loopback writes it for its own clients. Any other node writes it only if the node has a silo's own
    file, because that file limits what experiments may read.

    Raises:
        ClientFault: there is no experiment, or it is too long.
    """
    path = folder / "site.json"
    if path.exists():
        return
    experiment = config.get("experiment")
    if not isinstance(experiment, str) or len(experiment.encode(errors="surrogatepass")) > LONGEST:
        raise ClientFault(E_EXPERIMENT, f"the run's configuration has no experiment of at most {LONGEST} bytes")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    silo = str(Path(str(node["silo"])).expanduser().resolve()) if node.get("silo") else None
    site_file = {"experiment": experiment, "silo": silo, "client": None if silo else node.get("client")}
    _write(path, json.dumps(site_file).encode())


def admit(config: Mapping[str, Any], node: Mapping[str, Any], run_id: int) -> Path:
    """The folder of this client and this run, for a message from a server.

    It is a silo's folder, or one that a deployment on loopback has prepared.

    Raises:
        ClientFault: there is no such folder, the experiment is not that of the first message, another silo's file uses
            the folder, or the disk is full.
    """
    folder = folder_of(config, node, run_id)
    if node.get("silo"):
        try:
            _take_folder(silo_folder(folder), Path(str(node["silo"])).expanduser().resolve())
            prepare(folder, config, node)
        except OSError as error:
            raise off(error, folder) from None
    try:
        site_file = json.loads((folder / "site.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ClientFault(E_REFUSED, NO_SILO) from None
    if site_file["experiment"] != config.get("experiment"):
        raise ClientFault(E_EXPERIMENT, "the experiment differs from that at the beginning of this run")
    return folder


def _take_folder(own: Path, silo: Path) -> None:
    """Let one silo's file use the silo's own folder: with two, runs, log and counts of both would be mixed.

    Raises:
        ClientFault: another file that exists uses the folder.
    """
    mark = own / "silo"
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    user = os.fsdecode(mark.read_bytes()) if mark.exists() else ""
    if user == silo.name:
        return
    if user and (silo.parent / user).exists():
        complain(f"{silo}: {user} in the same folder uses {own.name}: give each silo a folder of its own")
        raise ClientFault(E_REFUSED, "the silo's folder is that of another silo; its own output says which")
    _write(mark, os.fsencode(silo.name))


def _write(path: Path, content: bytes) -> None:
    """Write a file as a whole, so that no process reads a part of it; others than its owner cannot read it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def off(error: OSError, folder: Path) -> ClientFault:
    """The fault for an error of the client's disk. The path is printed on this node, but not sent."""
    complain(f"{os.fsdecode(error.filename or folder)}: {error.strerror}; no reply is sent")
    return ClientFault(E_EXCEPTION, DISK)


def address(folder: Path) -> str:
    """Path of the worker's socket: in the folder, or in a private temporary folder if that path is too long."""
    path = str(folder.resolve() / "worker.sock")
    if len(path.encode()) <= _PATH:
        return path
    place = Path(tempfile.gettempdir()) / f"fedfm-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise InputError(f"{place} belongs to another user or is open to others: remove it, or set TMPDIR")
    return str(place / hashlib.sha256(path.encode()).hexdigest()[:24])


def running(folder: Path) -> bool:
    """Whether the client's worker is running; a worker keeps ``worker.lock`` locked until it ends."""
    return is_locked(folder / "worker.lock")


def start(folder: Path) -> None:
    """Start the client's worker, which outlives this process. If two start at once, one of them ends."""
    with open(os.open(folder / "worker.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "ab") as log:
        worker = subprocess.Popen(
            # -P and cwd prevent imports from the folder in which the node was started.
            [sys.executable, "-P", "-m", "fedfm.engines.flower.client_worker", str(folder.resolve())],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    worker.returncode = 0  # suppresses Python's warning about a child that is still running


def release(folder: Path) -> None:
    """Ask the client's worker to end once it is idle; the next message starts another one."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as link, contextlib.suppress(OSError):
        link.settimeout(1.0)
        link.connect(address(folder))
        send(link, "", END, "", b"")


def enter_run(folder: Path, node: int, run: int) -> None:
    """Store the ids of node and run; the silo needs them to ask the SuperLink whether the run has ended."""
    if flower_run(folder) != (node, run):
        with contextlib.suppress(OSError):  # if the disk is full, the worker ends after some idle time instead
            _write(folder / _FLOWER, json.dumps([node, run]).encode())


def flower_run(folder: Path) -> tuple[int, int] | None:
    """The ids that :func:`enter_run` stored; None if there are none."""
    try:
        node, run = json.loads((folder / _FLOWER).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    return (node, run) if type(node) is int and type(run) is int else None


def call(folder: Path, client: Any, handler: str, head: str, data: bytes) -> tuple[str, bytes]:
    """Send one message to the worker. If the worker ends during the message, send it again to a new one.

    This is safe: the client's memory is versioned by (round, call), so a repeated request finds the same state.

    Raises:
        ClientFault: E_DIED, two workers ended during the message, or none started.
    """
    for last in (False, True):
        with contextlib.closing(_connect(folder)) as link, contextlib.suppress(OSError):
            send(link, json.dumps(client), handler, head, data)
            if (answer := receive(link)) is not None:
                return answer[2], answer[3]
        deadline = time.monotonic() + 5
        # Wait until the old worker has ended, since its socket may accept connections until then.
        while running(folder) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not last:
            complain(f"{folder}: the worker ended before it answered {handler}; a new worker gets the message again")
    what, how = "the client's worker ended during the message, and so did a second one", _ending(folder)
    if _is_silo(folder):  # how the worker ended may depend on rows
        complain(f"{folder}: {what}: {how}")
        raise ClientFault(E_DIED, what)
    raise ClientFault(E_DIED, f"{what}: {how}")


def _is_silo(folder: Path) -> bool:
    """Whether the folder belongs to a silo with its own file; true if this is unknown."""
    try:
        return bool(json.loads((folder / "site.json").read_text(encoding="utf-8"))["silo"])
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _ending(folder: Path) -> str:
    """How the client's last worker ended; only the process that started it can get its status."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "worker.lock").read_text())
        for _ in range(20):  # a worker releases its lock shortly before it ends
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return cause(status)
            time.sleep(0.05)
    return "likely out of memory"


def _connect(folder: Path) -> socket.socket:
    deadline, started, tries = time.monotonic() + _START, 0.0, 0
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(address(folder))
            return link
        except (FileNotFoundError, ConnectionRefusedError):
            link.close()
        now = time.monotonic()
        if not running(folder) and now - started > 10:  # a worker takes the lock shortly after its start
            if tries == _TRIES:
                break
            start(folder)
            started, tries = now, tries + 1
        if now > deadline:
            break
        time.sleep(0.05)
    raise ClientFault(E_DIED, "the client's worker did not start; see worker.log in the client's folder")


def send(link: socket.socket, client: str, handler: str, head: str, data: bytes) -> None:
    """Send one frame: lengths, then the four parts."""
    parts = [client.encode(), handler.encode(), head.encode()]
    link.sendall(_HEADER.pack(*map(len, parts), len(data)) + b"".join(parts))
    link.sendall(data)


def receive(link: socket.socket) -> tuple[str, str, str, bytes] | None:
    """Receive one frame and return its four parts; None if the other side has closed the connection."""
    header = _exactly(link, _HEADER.size)
    if header is None:
        return None
    *lengths, size = _HEADER.unpack(header)
    if max(lengths) > _LIMIT:
        return None
    parts = [_exactly(link, n) for n in (*lengths, size)]
    if any(part is None for part in parts):
        return None
    client, handler, head, data = (bytes(part or b"") for part in parts)
    return client.decode(), handler.decode(), head.decode(), data


def _exactly(link: socket.socket, count: int) -> bytearray | None:
    block = bytearray(count)
    view = memoryview(block)
    while view:
        got = link.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return block


def fault_halves(fault: ClientFault, head: str, data: bytes) -> tuple[str, bytes]:
    """A reply with a fault, encoded without the wire format's module. The reply has the request's round and call."""
    round, call = 0, 0
    # The envelope begins with two integers, in this order: see the wire format's head grammar.
    if re.match(r'\{"m":\{"round":"i","call":"i"[,}]', head) and len(data) >= 16:
        round, call = struct.unpack("<qq", data[:16])
    fault_head = {"m": {"code": {"s": fault.code}, "reason": {"s": fault.reason[:400]}}}
    text = json.dumps({"m": {"round": "i", "call": "i", "fault": fault_head}}, separators=(",", ":"))
    return text, struct.pack("<qq", round, call)
