"""A federation of kits on this machine: provisioned, started by the kits' own scripts, stopped, killed, run."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.engines.flower import kit_manifest
from fedfm.sites import kits
from processes import ENV, here, mentioning, rounds, until

SILOS = ("hospital-a", "hospital-b")
BIN = Path(sys.executable).parent / "fedfm"
BITS = ("params_sha256", "local_accuracy", "client_accuracy", "bytes_up", "bytes_down")
METHOD = '[model]\nname = "features"\n[method]\nname = "scaffold"\nrounds = {rounds}\n[run]\nseed = 4\ntimeout = 240\n'


class Sites:
    """Two silos with rows of their own and a server without rows.

    Args:
        host: the server's address for the silos.
        within: for the server and each silo the command that runs another one where it is; empty: on this machine.
    """

    def __init__(
        self,
        folder: Path,
        more: str = "",
        rounds: int = 2,
        width: int = 5,
        host: str = "127.0.0.1",
        within: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._within = within or {}
        self.folder, self.kits, self.running = folder, folder / "kits", dict[str, subprocess.Popen]()
        self._runs: list[subprocess.Popen] = []
        self._guard, first = own_ports()
        (folder / "federation.toml").write_text(
            f'server = "{host}:{first}"\nfirst_port = {first + 1}\nsilos = {json.dumps(SILOS)}\n{more}'
        )
        self.provision()
        for seed, name in enumerate(SILOS):
            rng, y = np.random.default_rng(seed), np.arange(60) % 3
            x = np.tile((rng.normal(size=(60, 5)) + y[:, None]).astype(np.float32), (1, width // 5))
            split = np.where(np.arange(60) % 5 == 0, "test", "train")
            np.savez(self.kits / name / "rows.npz", x=x, y=y, classes=np.array(["a", "b", "c"]), split=split)
            file = self.kits / name / "silo.toml"
            file.write_text(file.read_text().replace("rows.csv", "rows.npz"))
        method = METHOD.format(rounds=rounds)
        rows = ", ".join(f'{name} = "{self.kits / name / "rows.npz"}"' for name in SILOS)
        self.experiment, self.alone = folder / "exp.toml", folder / "local.toml"
        self.experiment.write_text(
            '[data]\nclasses = ["a", "b", "c"]\nkind = "features"\n'
            f'width = {width}\n{method}engine = "deployment"\nsuperlink = "{self.kits / "server"}"\n'
        )
        self.alone.write_text(f"[data]\nclients = {{ {rows} }}\n{method}")

    def provision(self, *args: str) -> None:
        here("provision", self.folder / "federation.toml", "--out", self.kits, *args)

    def server(self) -> kit_manifest.Kit:
        return kit_manifest.load(self.kits / "server")

    def start(self, *names: str) -> None:
        """Run the kits' scripts."""
        for name in names or ("server", *SILOS):
            with open(self.folder / f"{name}.log", "a") as log:
                env = {**ENV, "FEDFM": str(BIN)}
                script = self.kits / name / "start.sh"
                command = [*self._within.get(name, ()), script]
                self.running[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        os.kill(self.running[name].pid, number)
        self.running.pop(name).wait(60)

    def process(self, name: str, program: str) -> int:
        """The id of one process of a kit, of Flower's program or of fedfm's own form of it."""
        ours = f"-m fedfm.engines.flower.private_programs {program.removeprefix('flower-')}"
        (found,) = [
            line
            for line in mentioning(self.kits / name)
            if re.match(rf"\d+ \S*python\S* (\S*{program}|{re.escape(ours)}) ", line)
            and _parent(line) == self.running[name].pid
        ]
        return int(found.split()[0])

    def kill(self, name: str, program: str) -> None:
        """Kill one process of a kit, as its supervisor would see it."""
        os.kill(self.process(name, program), signal.SIGKILL)

    def begin(self) -> subprocess.Popen:
        """A run in the background; what it tells is in :meth:`told`."""
        with open(self.folder / "run.log", "w") as log, open(self.folder / "run.out", "w") as out:
            command = [*self._within.get("server", ()), BIN, "run", self.experiment, "--out", self.folder / "run"]
            command += ["--format", "json"]
            run = subprocess.Popen([*map(str, command)], env=ENV, stdout=out, stderr=log, start_new_session=True)
        self._runs.append(run)
        return run

    def told(self) -> str:
        return (self.folder / "run.log").read_text()

    def result(self, running: subprocess.Popen, limit: float = 400.0) -> dict[str, Any]:
        """The result line of a run that ends."""
        code = running.wait(limit)
        assert code == 0, self.told() + self.logs()
        return json.loads((self.folder / "run.out").read_text().strip().splitlines()[-1])

    def logs(self) -> str:
        return "\n".join(path.read_text()[-1500:] for path in self.folder.glob("*.log"))

    def answers(self, name: str) -> list[tuple[int, int, str]]:
        """(round, call, handler) of all that left a silo."""
        lines = (self.kits / name / "silo.ledger.jsonl").read_text().splitlines()
        return [(e["round"], e["call"], e["handler"]) for e in map(json.loads, lines)]

    def end(self) -> None:
        for run in self._runs:
            run.kill()
            run.wait(60)
        for name in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                self.stop(name)
        self._guard.close()
        until(lambda: not mentioning(self.kits), what="processes outlived their kits")


def own_ports() -> tuple[socket.socket, int]:
    """The first of some ports that are ours while the socket is open: kits name ports long before they use them.

    Tests in other processes take other ports, and outgoing connections get none below 32768.
    """
    for guard in range(20_000, 32_000, 10):
        with contextlib.suppress(OSError):
            taken = socket.create_server(("127.0.0.1", guard))
            if all(kits.free(port) for port in range(guard + 1, guard + 10)):
                return taken, guard + 1
            taken.close()
    raise RuntimeError("no ports are free between 20000 and 32000")


def _parent(line: str) -> int:
    stat = Path(f"/proc/{line.split()[0]}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


@contextlib.contextmanager
def sites(folder: Path, more: str = "", rounds: int = 2, width: int = 5, **where: Any):
    """Kits that are not started yet; all their processes end with the block. ``where``: host and within."""
    found = Sites(folder, more, rounds, width, **where)
    try:
        yield found
    finally:
        found.end()


class Relay:
    """A TCP relay on loopback, as a firewall: it cuts connections on which nothing was said for a while.

    Between two requests, until it has cut ``most``: on a busy machine also a greeting takes a while, and a connection
    that is always cut there is never made. And as often as ``swallow`` says, when a SuperNode's poll is answered with
    a message, which Flower does not send again.
    """

    _MESSAGE = range(560, 700)  # bytes of such an answer, as TLS sends it; that to a push has about 530

    def __init__(self, port: int, to: int, idle: float, most: int = 20) -> None:
        self._to, self._idle, self._most, self.cut = to, idle, most, 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self._closed = self._ended = False
        self.swallow = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._ended:
            with contextlib.suppress(OSError):
                here, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(here,), daemon=True).start()

    def _carry(self, here: socket.socket) -> None:
        if self._closed:
            reset(here)
            return
        try:
            there = socket.create_connection(("127.0.0.1", self._to), timeout=5)
        except OSError:
            reset(here)
            return
        answered, last = False, time.monotonic()
        with contextlib.suppress(OSError):
            while not self._ended:
                for end in select.select((here, there), [], [], 0.02)[0]:
                    block = end.recv(1 << 16)
                    if not block:
                        raise OSError
                    if self.swallow and end is there and answered and len(block) in self._MESSAGE:
                        self.swallow -= 1
                        raise OSError
                    (there if end is here else here).sendall(block)
                    answered, last = end is there, time.monotonic()
                quiet = time.monotonic() - last
                idle = quiet > self._idle and self.cut < self._most
                if answered and (idle or (self._closed and quiet > 0.05)):
                    self.cut += 1
                    break
        reset(here)
        reset(there)

    def interrupt(self, seconds: float) -> None:
        """Cut every connection, and let nobody through for a while."""
        self._closed = True
        time.sleep(seconds)
        self._closed = False

    def close(self) -> None:
        self._ended = True
        self._listener.close()


@contextlib.contextmanager
def relayed(folder: Path, rounds: int, idle: float):
    """Kits whose silos reach the server through a relay."""
    with sites(folder, "proxy = true\n", rounds=rounds) as at:
        kit = at.server()
        relay = Relay(int(kit.server.rpartition(":")[2]), kit.port, idle)
        try:
            yield at, relay
        finally:
            relay.close()


def reset(end: socket.socket) -> None:
    """Close a connection without a goodbye."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    end.close()


def bits(result: dict) -> dict:
    return {key: result[key] for key in BITS} | {"excluded": result["excluded"]}


def once(at, *names: str) -> None:
    """None of these silos, or of all, gave an answer twice; a silo that is silent for long is greeted again."""
    for name in names or SILOS:
        left = [answer for answer in at.answers(name) if answer[2] != "query.hello"]
        assert len(left) == len(set(left)) > 0


def passed(at, running: subprocess.Popen, done: int) -> None:
    """Wait for a round of the run."""
    until(lambda: rounds(at.folder / "run") > done or running.poll() is not None, what="no such round")
    assert running.poll() is None, at.told() + at.logs()
