"""The group of processes of one client: start them, ask them, notice which of them ends or hangs."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfm.training.sharded import messages
from fedfm.training.sharded.settings import GroupSettings
from fedfm.version import __version__

PROGRAM = "fedfm.training.sharded.rank"
ADDRESS, SECRET = "FEDFM_GROUP", "FEDFM_GROUP_KEY"  # where this process listens, and the key of this one group
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "USER", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "HF_HOME")
_KEPT_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "SLURM_", "PMI", "UCX_", "TORCH_")
_LOOK = 1.0  # seconds between two questions for the ranks' progress
_START = 120.0  # seconds that ranks get to start at least; a launcher may wait for machines up to the group's limit
_HANDSHAKE = 10  # seconds in which a program that connects has to show that it has the group's key
_GRACE = 2.0  # seconds in which further ranks may report, since a rank that ends makes the others fail
_LOST = "connection to another rank"  # how ranks name the failure of a collective operation


class GroupFailure(Exception):
    """The group cannot answer.

    Attributes:
        kind: "ended" or "hangs": a rank did; "memory": a rank's memory is full; "refused": the settings do not fit;
            "error": any other error.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class ProcessGroup:
    """The ranks of one client.

    Args:
        settings: number of ranks, and how they are started.
    """

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self._work: dict[int, Connection] = {}
        self._watch: dict[int, Connection] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: tempfile.TemporaryDirectory[str] | None = None
        self._finalizer: Callable[[], object] = lambda: None

    @property
    def ranks(self) -> int:
        return self._settings.processes

    def start(self) -> None:
        """Start the ranks, and wait until they are connected to each other.

        Raises:
            GroupFailure: a rank does not start, or the ranks do not fit together.
        """
        far = bool(self._settings.launch)
        key = secrets.token_bytes(32)
        self._logs = tempfile.TemporaryDirectory(prefix="fedfm-ranks-")
        self._finalizer = weakref.finalize(self, _end, self._processes, self._logs)
        with socket.create_server(("" if far else "127.0.0.1", 0), backlog=2 * self.ranks) as listener:
            port = listener.getsockname()[1]
            where = {ADDRESS: f"{socket.gethostname() if far else '127.0.0.1'}:{port}", SECRET: key.hex()}
            self._launch(environment() | where)
            greetings = self._meet(listener, key)
        self._check(greetings)
        first = greetings[0]
        for rank in range(self.ranks):
            self._send(rank, {"host": first["host"], "port": first["port"]})
        self.answers()

    def _launch(self, variables: Mapping[str, str]) -> None:
        line = shlex.split(self._settings.launch)
        if line:
            torchrun = Path(line[0]).name == "torchrun" or line[1:3] == ["-m", "torch.distributed.run"]
            command = [*line, *([] if torchrun else [sys.executable, "-P"]), "-m", PROGRAM]
            self._processes.append(self._open("launch", command, variables))
            return
        if sys.platform == "linux":
            variables = {"GLOO_SOCKET_IFNAME": "lo"} | dict(variables)
        for rank in range(self.ranks):
            place = {"RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(rank)}
            program = [sys.executable, "-P", "-m", PROGRAM]
            self._processes.append(self._open(f"rank {rank}", program, dict(variables) | place))

    def _open(self, name: str, command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        try:
            with open(self._log(name), "wb") as log:
                return subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
                )
        except OSError as error:
            raise GroupFailure("refused", f"launch: {command[0]} cannot be started: {error.strerror}") from None

    def _meet(self, listener: socket.socket, key: bytes) -> list[dict[str, Any]]:
        """Both connections of each rank; returns the ranks' greetings in order."""
        greetings: dict[int, dict[str, Any]] = {}
        seconds = max(self._settings.limit, _START)
        deadline = time.monotonic() + seconds
        listener.settimeout(0.1)
        while len(self._work) + len(self._watch) < 2 * self.ranks:
            try:
                end, _ = listener.accept()
            except TimeoutError:
                self._check_alive()
                if time.monotonic() > deadline:
                    absent = sorted({*range(self.ranks)} - self._work.keys())
                    names = ", ".join(f"rank {rank}" for rank in absent)
                    raise GroupFailure("ended", f"{names} did not start within {seconds:g} s") from None
                continue
            greeted = _greet(end, key)
            if greeted is None:
                continue
            link, hello = greeted
            rank = hello["rank"]
            if hello["ranks"] != self.ranks or not 0 <= rank < self.ranks:
                started = f"launch: it starts {hello['ranks']} processes"
                raise GroupFailure("refused", f"{started}, and processes = {self.ranks}: make them equal")
            if hello["channel"] == "watch":
                self._watch[rank] = link
            else:
                self._work[rank], greetings[rank] = link, hello
        return [greetings[rank] for rank in range(self.ranks)]

    def _check_alive(self) -> None:
        """Raise a GroupFailure if a process ended before it was connected."""
        for number, process in enumerate(self._processes):
            if (code := process.poll()) is None:
                continue
            name = "launch" if self._settings.launch else f"rank {number}"
            last = self._tail(name)
            raise GroupFailure(
                "refused" if name == "launch" else "ended", f"{name} {_describe_end(code)} before it was ready{last}"
            )

    def _check(self, greetings: list[dict[str, Any]]) -> None:
        """Raise a GroupFailure if the ranks' versions differ, or there are too few GPUs."""
        own = {"fedfm": __version__, "torch": torch.__version__}
        for rank, hello in enumerate(greetings):
            for name, version in own.items():
                if hello[name] != version:
                    raise GroupFailure(
                        "refused",
                        f"rank {rank} on {hello['machine']} has {name} {hello[name]}, and this process {version}; "
                        "install the same version on all machines",
                    )
        if self._settings.device == "cpu":
            return
        for machine in dict.fromkeys(hello["machine"] for hello in greetings):
            gpus = [hello["gpu"] for hello in greetings if hello["machine"] == machine and hello["gpu"]]
            if len(set(gpus)) < len(gpus):
                raise GroupFailure(
                    "refused",
                    f"{machine} has {len(set(gpus))} GPUs for {len(gpus)} processes; expected at most one process a "
                    'GPU, or device = "cpu"',
                )

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a request to the ranks; rank 0 passes it on."""
        self._send(0, message)

    def tell_encoded(self, message: bytes) -> None:
        """As :meth:`tell`, for a message that :func:`fedfm.training.sharded.messages.encode` made."""
        self._send_bytes(0, message)

    def send_tensor(self, tensor: Tensor) -> None:
        """Send a tensor that belongs to the last request."""
        self._send(0, {"t": tensor})

    def receive_tensor(self) -> Tensor:
        """Receive a tensor that belongs to the answer of rank 0."""
        found: Tensor = self._collect((0,))[0]["t"]
        return found

    def answers(self) -> list[dict[str, Any]]:
        """Each rank's answer to the last request, in order.

        Raises:
            GroupFailure: a rank has ended, hangs, or reports an error.
        """
        found = self._collect(tuple(range(self.ranks)))
        return [found[rank] for rank in range(self.ranks)]

    def _send(self, rank: int, message: Mapping[str, Any]) -> None:
        self._send_bytes(rank, messages.encode(message))

    def _send_bytes(self, rank: int, message: bytes) -> None:
        link = self._work[rank]
        try:
            _set_timeout(link, socket.SO_SNDTIMEO, max(int(self._settings.limit), 1))
            link.send_bytes(message)
        except BlockingIOError:
            raise GroupFailure("hangs", f"rank {rank} hangs: it reads nothing") from None
        except OSError:
            self._collect((rank,))  # raises with the cause
            raise GroupFailure("ended", f"rank {rank} has closed its connection") from None

    def _collect(self, ranks: tuple[int, ...]) -> dict[int, dict[str, Any]]:
        """One message of each of these ranks."""
        found: dict[int, dict[str, Any]] = {}
        steps: dict[int, tuple[int, str]] = {}
        moved = asked = heard = time.monotonic()
        silent = dict.fromkeys(self._watch, heard)
        while len(found) < len(ranks):
            waiting = [self._work[rank] for rank in ranks if rank not in found]
            ready = wait([*waiting, *self._watch.values()], timeout=_LOOK)
            now = time.monotonic()
            for rank in ranks:
                if rank not in found and self._work[rank] in ready:
                    message = self._receive(rank, self._work[rank])
                    if "failure" in message:
                        raise self._find_cause(rank, message)
                    found[rank], moved = message, now
            for rank, link in self._watch.items():
                if link in ready:
                    at = self._receive(rank, link)
                    silent[rank] = now
                    if steps.get(rank) != (at["count"], at["at"]):
                        steps[rank], moved = (at["count"], at["at"]), now
            if now - asked >= _LOOK:
                asked = now
                for rank, link in self._watch.items():
                    try:
                        link.send_bytes(b"?")
                    except OSError:
                        raise self._find_cause(rank, None) from None
            if now - moved > self._settings.limit:
                raise self._name_hanging(now, silent, steps)
        return found

    def _receive(self, rank: int, link: Connection) -> dict[str, Any]:
        try:
            return messages.decode(link.recv_bytes())
        except (EOFError, OSError):
            raise self._find_cause(rank, None) from None

    def _find_cause(self, rank: int, failure: Mapping[str, Any] | None) -> GroupFailure:
        """The cause of a failure: a rank that ended or reported an error makes the others fail a moment later."""
        seen: dict[int, Mapping[str, Any] | None] = {rank: failure}
        end = time.monotonic() + _GRACE
        while time.monotonic() < end:
            waiting = {link: r for r, link in self._work.items() if r not in seen}
            for link in wait([*waiting], timeout=0.1) if waiting else ():
                try:
                    message = messages.decode(link.recv_bytes())  # type: ignore[union-attr]
                    if "failure" in message:
                        seen[waiting[link]] = message  # type: ignore[index]
                except (EOFError, OSError):
                    seen[waiting[link]] = None  # type: ignore[index]
            codes = [process.poll() for process in self._processes]
            if not waiting or (all(message is None for message in seen.values()) and any(codes)):
                break
        told = {r: message for r, message in seen.items() if message is not None}
        cause = next(((r, m) for r, m in told.items() if m["kind"] != "lost"), None)
        if cause is not None:
            return GroupFailure(cause[1]["kind"], f"rank {cause[0]} of {self.ranks}: {cause[1]['failure']}")
        gone = [r for r in seen if r not in told]
        if not gone:
            return GroupFailure("ended", f"rank {rank} of {self.ranks} lost the {_LOST}")
        return GroupFailure("ended", f"rank {gone[0]} of {self.ranks} {self._ending(gone[0])}")

    def _ending(self, rank: int) -> str:
        if self._settings.launch:
            return "has ended"
        process = self._processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        return "has closed its connection" if process.returncode is None else _describe_end(process.returncode)

    def _name_hanging(
        self, now: float, silent: Mapping[int, float], steps: Mapping[int, tuple[int, str]]
    ) -> GroupFailure:
        """Name the ranks that do not answer; if all answer, those that are behind."""
        limit = f"no progress within {self._settings.limit:g} s"
        mute = [rank for rank, since in silent.items() if now - since > 2 * _LOOK + 1]
        if not mute and steps:
            last = min(count for count, _ in steps.values())
            mute = [rank for rank, (count, _) in steps.items() if count == last]
        names = ", ".join(f"rank {rank}" for rank in mute)
        at = next((text for rank, (_, text) in steps.items() if rank in mute), "")
        return GroupFailure("hangs", f"{names} of {self.ranks} hangs: {limit}{f' after {at}' if at else ''}")

    def close(self) -> None:
        """End all ranks."""
        for link in (*self._work.values(), *self._watch.values()):
            link.close()
        self._work, self._watch = {}, {}
        self._finalizer()
        self._processes = []

    def _log(self, name: str) -> Path:
        assert self._logs is not None  # noqa: S101 - for mypy; start() makes the folder
        return Path(self._logs.name) / f"{name}.log"

    def _tail(self, name: str) -> str:
        with suppress(OSError):
            lines = self._log(name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            words = [line.strip() for line in lines if any(map(str.isalnum, line))]  # Open MPI ends with a ruled line
            return f": {words[-1][:300]}" if words else ""
        return ""


def _greet(end: socket.socket, key: bytes) -> tuple[Connection, dict[str, Any]] | None:
    """The connection and the greeting of a rank; None for a program without the group's key, or one that ends."""
    end.setblocking(True)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _HANDSHAKE, 0))
    link = Connection(end.detach())
    try:
        deliver_challenge(link, key)
        answer_challenge(link, key)
        hello = messages.decode(link.recv_bytes())
    except (OSError, EOFError, AuthenticationError):
        link.close()
        return None
    _set_timeout(link, socket.SO_RCVTIMEO, 0)
    return link, hello


def _set_timeout(link: Connection, which: int, seconds: int) -> None:
    """Limit the seconds for which a connection waits to send or to receive; 0: no limit."""
    with socket.socket(fileno=os.dup(link.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", seconds, 0))


def _end(processes: list[subprocess.Popen[bytes]], logs: tempfile.TemporaryDirectory[str]) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
    logs.cleanup()


def _describe_end(code: int) -> str:
    """How a process ended, from its return code."""
    if code >= 0:
        return f"ended with exit status {code}"
    hint = ", likely out of memory" if code == -signal.SIGKILL else ""
    return f"was ended by signal {-code} ({signal.Signals(-code).name}{hint})"


def environment() -> dict[str, str]:
    """The variables of this process that ranks get: where programs and devices are, and no secrets."""
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    return {"OMP_NUM_THREADS": "1", **kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
