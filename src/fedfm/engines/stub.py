"""The thin side of a ClientApp: hands a message's bytes to the site's warm worker and gets the reply's bytes back.

Flower starts a new process for every message. One that imports torch and loads a model takes 10 s and more, so this one
does neither: it speaks to a worker process of the site over a Unix socket, and starts that process if it is not there.
This module imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from urllib.parse import quote

from fedfm.errors import E_DIED, ClientFault, InputError

_HEADER = struct.Struct("<III Q")  # lengths of client, handler, head and data
_LIMIT = 1 << 30  # of each of the first three
_PATH = 100  # bytes that fit into a socket's address
_START = 120.0  # seconds until a worker that was started listens


def folder_of(config: Mapping[str, Any], node: Mapping[str, Any], run_id: int) -> Path:
    """The folder of this site and this run: worker, socket, the client's memory and its errors.

    ``site`` of the node's configuration says where, else it lies beside the silo's file, else under ``~/.fedfm/sites``.
    """
    if node.get("site"):
        root = Path(str(node["site"]))
    elif node.get("silo"):
        root = Path(str(node["silo"])).expanduser().resolve().parent / ".fedfm"
    else:
        root = Path("~/.fedfm/sites").expanduser()
    key = str(config.get("key") or "")
    if not key:  # a run's name alone may come again, with another experiment
        digest = hashlib.sha256(str(config.get("experiment")).encode()).hexdigest()
        key = f"{config.get('run') or run_id}-{digest[:8]}"
    who = str((node.get("silo") and "silo") or node.get("client") or f"partition-{node.get('partition-id', 0)}")
    return root / plain(key) / plain(who)


def plain(name: str) -> str:
    """A file name for a text that others chose; ``store.safe_name`` does the same where torch is loaded."""
    text = quote(name, safe="", errors="surrogatepass")
    text = text if name.strip(".") else text.replace(".", "%2E")
    return text if len(text) <= 255 else f"{text[:160]}+{hashlib.sha256(text.encode()).hexdigest()}"


def prepare(folder: Path, config: Mapping[str, Any], node: Mapping[str, Any]) -> None:
    """Write ``site.json``, from which the worker learns what it serves.

    Raises:
        InputError: the node's configuration does not say who this is.
    """
    known = [key for key in ("silo", "client", "partition-id") if key in node]
    if not known:
        raise InputError(
            "the node's configuration has neither silo, client nor partition-id: start it with --node-config"
        )
    path = folder / "site.json"
    if path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    silo = str(Path(str(node["silo"])).expanduser().resolve()) if "silo" in node else None
    told = {"experiment": config["experiment"], "silo": silo, "client": node.get("client", node.get("partition-id"))}
    handle, temporary = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(told, file)
    os.replace(temporary, path)


def address(folder: Path) -> str:
    """The worker's socket: in the folder, or where a path is too long for a socket, in a private place of this user."""
    path = str(folder.resolve() / "worker.sock")
    if len(path.encode()) <= _PATH:
        return path
    place = Path(tempfile.gettempdir()) / f"fedfm-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    status = place.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise InputError(f"{place} belongs to somebody else or is open to others: remove it, or set TMPDIR")
    return str(place / hashlib.sha256(path.encode()).hexdigest()[:24])


def running(folder: Path) -> bool:
    """Whether the site's worker is there: it holds a lock as long as it lives."""
    try:
        with open(folder / "worker.lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
            return False
    except FileNotFoundError:
        return False


def start(folder: Path) -> None:
    """Start the site's worker; of two that start at once, one stays. It outlives the process that asked for it."""
    with open(os.open(folder / "worker.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "ab") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "fedfm.engines.worker", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    worker.returncode = 0  # nobody waits for it, and Python need not complain that it lives on


def call(folder: Path, client: Any, handler: str, head: str, data: bytes) -> tuple[str, bytes]:
    """One message through the worker.

    Raises:
        ClientFault: E_DIED, the worker ended while it was at work, or did not start.
    """
    with contextlib.closing(_connect(folder)) as link:
        try:
            send(link, json.dumps(client), handler, head, data)
            answer = receive(link)
        except OSError as error:
            raise ClientFault(E_DIED, f"the site's worker is gone: {error.strerror}") from None
    if answer is None:
        raise ClientFault(E_DIED, "the site's worker ended while it was at work, likely out of memory")
    return answer[2], answer[3]


def _connect(folder: Path) -> socket.socket:
    deadline, started = time.monotonic() + _START, 0.0
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(address(folder))
            return link
        except (FileNotFoundError, ConnectionRefusedError):
            link.close()
        now = time.monotonic()
        if now > deadline:
            raise ClientFault(E_DIED, "the site's worker did not start; see worker.log in the site's folder")
        if not running(folder) and now - started > 10:  # it takes the lock a moment after it has been started
            start(folder)
            started = now
        time.sleep(0.05)


def send(link: socket.socket, client: str, handler: str, head: str, data: bytes) -> None:
    """One frame: lengths, then the four parts."""
    parts = [client.encode(), handler.encode(), head.encode()]
    link.sendall(_HEADER.pack(*map(len, parts), len(data)) + b"".join(parts))
    link.sendall(data)


def receive(link: socket.socket) -> tuple[str, str, str, bytes] | None:
    """A frame's four parts; None if the other side is gone."""
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
    """A reply that tells a fault, made without :mod:`fedfm.wire`; round and call are those of the request."""
    round, call = 0, 0
    # The envelope's first two entries are two integers, in this order: see wire's head grammar.
    if re.match(r'\{"m":\{"round":"i","call":"i"[,}]', head) and len(data) >= 16:
        round, call = struct.unpack("<qq", data[:16])
    told = {"m": {"code": {"s": fault.code}, "reason": {"s": fault.reason[:400]}}}
    text = json.dumps({"m": {"round": "i", "call": "i", "fault": told}}, separators=(",", ":"))
    return text, struct.pack("<qq", round, call)
