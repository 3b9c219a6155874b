"""``fedfm start KIT``: run the processes of a kit, and restart processes that end, until this process is stopped.

The server's processes are Flower's SuperLink, whose state is in a file, and the executor of ServerApps. A silo's
processes are a SuperNode and the executor of ClientApps. If the server's kit gets a new certificate, the SuperLink
restarts with the new certificate.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fedfm.engines.child_processes import Children
from fedfm.engines.flower import client_stub, loopback, loopback_keys, operator_home
from fedfm.engines.flower.kit_manifest import NODES, Kit, load
from fedfm.engines.flower.node_status import NodeStatus
from fedfm.engines.flower.private_api import OPERATOR, QUICK_EXECUTOR, Control, NodeView
from fedfm.engines.flower.run_watch import RunWatch
from fedfm.engines.flower.server_seen import Lookout
from fedfm.errors import InputError, RunError
from fedfm.sites import certificate_authority
from fedfm.sites.kits import free
from fedfm.sites.request_log import SiloLog

_POLL = 0.2
_LOOK = 3.0  # seconds between checks for a new certificate and new keys of silos
_PAUSES = (1.0, 30.0)  # seconds before a process that ended starts again: first and longest pause
_NOT_ADMITTED = "[code: 2004]"  # Flower's error for a node whose key is not registered or already in use
_REPEAT = 600.0  # seconds before the same report about a process that ended is repeated
_STEADY = 60.0  # seconds; if a process ran longer than this, its next restart waits only for the first pause


def start(folder: Path, tell: Callable[[str], None], stop: Callable[[], bool] | None = None) -> None:
    """Run a kit until SIGTERM or Ctrl-C.

    Args:
        tell: called with each line for the user.
        stop: called repeatedly until it returns True, which ends the kit. By default SIGTERM and Ctrl-C end it.

    Raises:
        InputError: the kit is incomplete, or another process runs it.
    """
    kit = load(folder.resolve())
    _check(kit)
    with contextlib.ExitStack() as stack:
        stopped = stop or stack.enter_context(_signals())
        stack.enter_context(_only(kit))
        _Supervisor(kit, tell).run(stopped)


def _check(kit: Kit) -> None:
    for name in kit.files if kit.serves else (*kit.files, "silo.toml"):
        path = kit.folder / name
        if not path.is_file():
            new = "; `fedfm provision` with the same file adds it to the kit" if name == OPERATOR else ""
            raise InputError(f"{path} is missing: the kit is incomplete; copy it again{new}")
        if path.suffix in (".key", ".secret") and path.stat().st_mode & 0o077:
            raise InputError(f"{path} is open to other users; run chmod 600 on it")
    if kit.serves:
        end = certificate_authority.validity(kit.folder / "server.pem")[1]
        if end < datetime.datetime.now(datetime.UTC):
            raise InputError(
                f"{kit.folder / 'server.pem'}: the certificate ended on {end:%Y-%m-%d}, so that no silo connects: "
                "`fedfm provision FILE --out KITS --renew` makes a new one"
            )
    else:
        from fedfm.sites import silo_config

        silo = silo_config.load(kit.folder / "silo.toml")
        if silo.name != kit.name:
            raise InputError(f'{kit.folder / "silo.toml"}: name = "{silo.name}", but the kit belongs to {kit.name}')
        if not Path(silo.data).exists():
            raise InputError(f"{kit.folder / 'silo.toml'}: data: {silo.data} does not exist; write where your rows are")


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.signal(number, lambda number, frame: asked.append(number)) for number in numbers}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _only(kit: Kit) -> Iterator[None]:
    import fcntl

    with open(kit.folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{kit.folder}: another process runs this kit") from None
        yield


class _Supervisor:
    """Starts a kit's processes, and restarts processes that end."""

    def __init__(self, kit: Kit, tell: Callable[[str], None]) -> None:
        self._kit, self._listener = kit, tell
        self._state = kit.folder / ".fedfm"  # a silo's folder also holds its runs and its log
        self._state.mkdir(mode=0o700, exist_ok=True)
        self._children = Children(self._state / "logs", self._environment())
        self._commands = self._server() if kit.serves else self._silo()
        self._due = dict.fromkeys(self._commands, 0.0)
        self._pause = dict.fromkeys(self._commands, _PAUSES[0])
        self._began: dict[str, float] = {}
        self._said: dict[str, tuple[str, float]] = {}  # by process: the last report of its end, and that report's time
        self._certificate = self._stamp()
        self._admitted: dict[str, bytes] = {}  # public keys by the silo's name
        self._control: Control | None = None
        self._looked = 0.0
        self._hopeful: Callable[[], bool] = lambda: True  # whether a node may try to connect
        self._watches: list[Lookout | RunWatch] = []

    def run(self, stop: Callable[[], bool]) -> None:
        kit = self._kit
        where = f"listens at {kit.server}" if kit.serves else f"connects to {kit.server}"
        self._tell(f"{kit.name} {where}; logs are in {self._state / 'logs'}")
        if not kit.serves:
            self._watch_server()
        try:
            while not stop():
                self._step(time.monotonic())
                time.sleep(_POLL)
        finally:
            for watch in self._watches:
                watch.end()
            self._children.end()
            if self._control is not None:
                self._control.close()
            if not kit.serves:
                loopback.end_workers(self._state / client_stub.RUNS)
            for name in ("home", "secret"):
                shutil.rmtree(self._state / name, ignore_errors=True)
            self._tell(f"{kit.name} has ended")

    def _watch_server(self) -> None:
        """Watch the server, and end the workers of runs that end there."""
        kit = self._kit
        lookout = Lookout(kit.server, kit.folder / "ca.crt", self._tell)
        self._hopeful = lambda: lookout.may_connect
        runs = self._state / client_stub.RUNS
        watch = RunWatch(runs, self._over, lambda: lookout.clear, self._note)
        watch.start()
        self._watches = [lookout, watch]

    def _over(self, node: int, run: int) -> bool | None:
        kit = self._kit
        with contextlib.closing(NodeView(kit.server, kit.folder / "ca.crt", kit.folder / "node.key")) as view:
            return view.over(node, run)

    def _tell(self, text: str) -> None:
        """Report a line; in a silo's kit, write it into the silo's log as well."""
        self._listener(text)
        if not self._kit.serves:
            self._note(text)

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError, RunError):  # a full disk must not stop the kit
            SiloLog(self._state, self._kit.folder / "silo.toml").note(text)

    def _step(self, now: float) -> None:
        for name, how in self._children.reap():
            if now - self._began[name] > _STEADY:
                self._pause[name] = _PAUSES[0]
            self._due[name] = now + self._pause[name]
            why = self._port_conflict(name) or self._cause(name)
            text = f"{name} ended with {how}{f' ({why})' if why else ''}; it starts again"
            if self._said.get(name, ("", 0.0))[0] != text or now - self._said[name][1] > _REPEAT:
                self._said[name] = text, now
                self._tell(text)
            self._pause[name] = min(self._pause[name] * 2, _PAUSES[1])
        for name, due in list(self._due.items()):
            if due <= now and (name != "supernode" or self._hopeful()):
                del self._due[name]
                self._begin(name, now)
        if self._kit.serves and now - self._looked > _LOOK:
            self._looked = now
            if self._stamp() != self._certificate:
                self._certificate = self._stamp()
                self._tell("the certificate is new: the SuperLink starts again with it")
                self._children.stop("superlink")
                self._begin("superlink", now)
            self._admit()

    def _port_conflict(self, name: str) -> str:
        """Describe the conflict if another program uses the port of this process; "" if none does."""
        port, remedy = self._kit.port, "end it" if self._kit.serves else "end it, or change port in kit.json"
        if name not in ("superlink", "supernode") or free(port):
            return ""
        return f"another program listens at port {port} of this machine: {remedy}"

    def _cause(self, name: str) -> str:
        """Return the reason why a process ended, from its log."""
        text = self._children.tail(name, 40)
        if name == "supernode" and _NOT_ADMITTED in text:
            return (
                f"the server does not admit this silo's key yet: node.pub belongs there as silos/{self._kit.name}.pub; "
                "or another node has the same key and is connected"
            )
        after = text.partition("Exit Code:")[2].splitlines()[1:]  # Flower's message about the end
        return next(iter(after or text.splitlines()[-1:]), "")

    def _begin(self, name: str, now: float) -> None:
        log = self._children.log(name)
        if log.exists():
            os.replace(log, log.with_suffix(".log.1"))
        self._began[name] = now
        self._children.start(name, self._commands[name])

    def _stamp(self) -> tuple[int, ...]:
        """Return the modification times of the server's certificate and key; empty for a silo."""
        if not self._kit.serves:
            return ()
        try:
            return tuple((self._kit.folder / name).stat().st_mtime_ns for name in ("server.pem", "server.key"))
        except OSError:  # the files are being replaced
            return self._certificate

    def _admit(self) -> None:
        """Register the silos' public keys that are in the kit, one per silo, once the SuperLink answers."""
        try:
            files = {path.stem: path.read_bytes() for path in sorted((self._kit.folder / NODES).glob("*.pub"))}
        except OSError:  # the files are being replaced
            return
        if files == self._admitted:
            return
        for name in [name for name in self._admitted if name not in files]:
            del self._admitted[name]
            self._tell(
                f"{NODES}/{name}.pub is missing, but its key is still admitted; another key in this file revokes it"
            )
        try:
            if self._control is None:
                self._refuses_strangers()
                self._control = Control(self._kit.local, self._kit.folder / "ca.crt")
            known = {_key(node.public_key): node for node in self._control.nodes()}
            for name, text in files.items():
                if self._admitted.get(name) != text:
                    self._register(self._control, name, text, known)
                    self._admitted[name] = text
        except RunError:  # the SuperLink is starting
            return

    def _register(self, control: Control, name: str, text: bytes, known: Mapping[bytes, NodeStatus]) -> None:
        try:
            key = _key(text)
        except ValueError as error:
            self._tell(f"{self._kit.folder / NODES / name}.pub: the public key cannot be read: {error}")
            return
        for other in [node for node in known.values() if node.name == name and _key(node.public_key) != key]:
            control.unregister(other.id)
            self._tell(f"{name} has a new key; its old key is no longer admitted")
        if key not in known:
            control.register(key, name)
            self._tell(f"{name} may connect")
        elif known[key].name != name:
            called = known[key].name or "no name"
            self._tell(f"{name} cannot connect: its key is registered under {called}; each silo needs its own key")

    def _refuses_strangers(self) -> None:
        """Make sure that the SuperLink refuses requests without the operator's secret.

        Raises:
            InputError: the SuperLink accepts such requests.
            RunError: the SuperLink does not answer.
        """
        with tempfile.TemporaryDirectory() as folder:
            authority = Path(folder) / "ca.crt"  # Control finds no secret next to this copy
            authority.write_bytes((self._kit.folder / "ca.crt").read_bytes())
            with contextlib.closing(Control(self._kit.local, authority)) as stranger:
                try:
                    stranger.nodes()
                except InputError:
                    return
        raise InputError(
            f"the SuperLink at {self._kit.local} accepts requests from everyone who reaches it: it is stopped"
        )

    # --- commands ----------------------------------------------------------------------------------------------------

    def _server(self) -> dict[str, list[str]]:
        kit, at = self._kit, self._kit.folder
        operator_home.write(self._state / "operator", kit.local, at / "ca.crt", at / OPERATOR)
        superlink = [*loopback.PROGRAMS, "superlink", str(at / OPERATOR), "--ssl-ca-certfile", str(at / "ca.crt")]
        superlink += ["--ssl-certfile", str(at / "server.pem"), "--ssl-keyfile", str(at / "server.key")]
        superlink += ["--enable-supernode-auth", "--host", kit.listens, "--port", str(kit.port)]
        superlink += ["--database", str(self._state / "state.db"), "--disable-runtime-dependency-installation"]
        secret = ["--superexec-auth-secret-file", str(at / "superexec.secret")]
        executor = ["flower-superexec", "--runtime-api-address", kit.local, "--root-certificates", str(at / "ca.crt")]
        return {
            "superlink": [*superlink, "--isolation", "process", *secret],
            "superexec": [*executor, *secret, "--parent-pid", str(os.getpid())],
        }

    def _silo(self) -> dict[str, list[str]]:
        kit, at = self._kit, self._kit.folder
        folder = self._state / "secret"
        folder.mkdir(mode=0o700, exist_ok=True)
        secret = ["--superexec-auth-secret-file", str(loopback_keys.write_secret(folder / "superexec.secret"))]
        node = [*loopback.PROGRAMS, "supernode"] if kit.loopback else ["flower-supernode"]
        node += ["--superlink", kit.server, "--root-certificates", str(at / "ca.crt")]
        node += ["--auth-supernode-private-key", str(at / "node.key"), "--host", "127.0.0.1", "--port", str(kit.port)]
        executor = [*loopback.PROGRAMS, "superexec", "--insecure", "--runtime-api-address", f"127.0.0.1:{kit.port}"]
        return {
            "supernode": [*node, "--node-config", f'silo="{at / "silo.toml"}"', "--isolation", "process", *secret],
            "executor": [*executor, *secret, "--parent-pid", str(os.getpid())],
        }

    def _environment(self) -> dict[str, str]:
        quick = {} if self._kit.loopback else dict.fromkeys(QUICK_EXECUTOR, "1.0")
        return loopback.environment(self._state / "home") | quick


def _key(data: bytes) -> bytes:
    """Convert a public key from PEM or ssh-keygen's format to one normal form."""
    from cryptography.hazmat.primitives import serialization

    text = data.strip()
    read = serialization.load_pem_public_key if text.startswith(b"-----") else serialization.load_ssh_public_key
    pem, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(read(text).public_bytes(pem, form))
