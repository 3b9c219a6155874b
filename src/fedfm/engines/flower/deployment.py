"""The deployment engine: SuperLink and SuperNodes over TLS with node authentication.

Without ``run.superlink`` this process starts SuperLink and SuperNodes on loopback, with new keys, and ends them after
the run. With ``run.superlink`` the run is submitted to an existing SuperLink. In both cases Flower starts the
ServerApp, which writes the run directory, and this process watches that directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.config.cohorts import enough
from fedfm.engines.flower import app_writer, kit_manifest, server_app
from fedfm.engines.flower.loopback import Fleet, loopback
from fedfm.engines.flower.node_status import Missing
from fedfm.engines.flower.private_api import Control
from fedfm.engines.interruption import Interrupted
from fedfm.engines.known_clients import dealt_clients
from fedfm.errors import InputError, RunError
from fedfm.runtime import failures, waiting_file
from fedfm.runtime.disclosure import private_notices
from fedfm.runtime.run_directory import Run

if TYPE_CHECKING:
    from fedfm.runtime.progress import Progress

_POLL = 0.1
_PATIENCE = 120.0  # seconds for the SuperLink of this machine's kit to start
_AWAY = 3600.0  # longest time in seconds that the connection to the SuperLink may be down in a run
_TRIES = 3  # a run is submitted at most this many times if no further round completes
_LOOK = 5.0  # seconds between two checks for missing silos


def start(
    run: Run, stop: Callable[[], bool], progress: Progress, silos: Mapping[str, Path] | None = None
) -> dict[str, Any]:
    """Run to the end, on the experiment's SuperLink or on a new one.

    Args:
        silos: names and files of the silos at a new SuperLink; None means the experiment's clients.
    """
    folder = run.path / "private" / "deployment"
    folder.mkdir(mode=0o700, exist_ok=True)
    if run.experiment.run.superlink:
        return _attach(run, folder, stop, progress)
    if run.experiment.data.classes is not None and silos is None:
        raise InputError(
            "data.classes: only silos have the rows, and nodes that this command starts on loopback have none; set "
            "run.superlink to the server's kit, or to host:port"
        )
    clients = dealt_clients(run.experiment) if silos is None else []
    enough(run.experiment, clients or list(silos or ()))
    config = {"experiment": app_writer.experiment_text(run.experiment), "key": key_of(run)}
    with loopback(folder, clients, config, stop, silos) as fleet:
        return _Watch(run, fleet.control, fleet, stop, progress).follow(
            _submit(run, folder, fleet.control, loopback=True)
        )


def _attach(run: Run, folder: Path, stop: Callable[[], bool], progress: Progress) -> dict[str, Any]:
    spec = run.experiment.run
    wait = 0.0
    address, given = str(spec.superlink), spec.root_certificates or os.environ.get("FEDFM_ROOT_CERTIFICATES", "")
    if Path(address).is_dir():  # the server's kit, on this machine
        kit = kit_manifest.load(Path(address))
        if not kit.serves:
            raise InputError(
                f'run.superlink = "{address}" is the kit of a silo; expected the kit of the server, or host:port'
            )
        address, given, wait = kit.local, str(kit.folder / "ca.crt"), _PATIENCE
    if not given or not Path(given).is_file():
        raise InputError(
            f'run.superlink = "{spec.superlink}": its authority\'s certificate is needed: set run.root_certificates or '
            f"FEDFM_ROOT_CERTIFICATES to a PEM file{f' ({given}: no such file)' if given else ''}"
        )
    with contextlib.closing(Control(address, Path(given))) as control:
        if wait:
            _reach(control, wait, stop, progress)
            _gather(control, spec.timeout, stop, progress)
        tries, done = 0, -1
        while True:
            watch = _Watch(run, control, None, stop, progress)
            tries, done = (tries + 1 if watch.last_complete_round == done else 1), watch.last_complete_round
            try:
                return watch.follow(_submit(run, folder, control))
            except _Lost as lost:
                if tries == _TRIES:
                    raise RunError(str(lost)) from None
                progress.notice(f"{lost}; the run is submitted again and continues after its last completed round")
                _reach(control, _AWAY, stop, progress)


class _Lost(Exception):
    """The run ended at the SuperLink, but it neither completed nor failed."""


def _gather(control: Control, wait: float, stop: Callable[[], bool], progress: Progress) -> None:
    """Wait until all silos of the kit are connected, for at most ``wait`` s. Missing silos change the results."""
    deadline, missing = time.monotonic() + wait, Missing(progress.notice)
    while time.monotonic() < deadline:
        with contextlib.suppress(RunError):
            if (nodes := control.nodes()) and not missing.tell(nodes):
                return
        if stop():
            raise Interrupted
        time.sleep(0.5)


def _reach(control: Control, wait: float, stop: Callable[[], bool], progress: Progress) -> None:
    """Wait until the SuperLink, which may still be starting, answers.

    Raises:
        RunError: it does not answer in time.
        Interrupted: the user stopped the run.
    """
    deadline, notified = time.monotonic() + wait, False
    while True:
        try:
            control.nodes()
            return
        except RunError:
            if time.monotonic() > deadline:
                raise
        if not notified:
            notified = True
            progress.notice("waiting for the SuperLink")
        if stop():
            raise Interrupted
        time.sleep(0.5)


def _submit(run: Run, folder: Path, control: Control, *, loopback: bool = False) -> int:
    """Submit the app to the SuperLink, and return the run's id."""
    (run.path / server_app.OUTCOME).unlink(missing_ok=True)
    place = folder / "app"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    path = run.path.resolve()
    app_writer.write_app(place, run.experiment, out=path.parent, run=path.name, key=key_of(run), loopback=loopback)
    (place / "pyproject.toml").chmod(0o600)
    return control.start(place)


def key_of(run: Run) -> str:
    """Name of the run's folder at the clients. It is unique to the run and stays the same when the run is resumed."""
    digest = hashlib.sha256(f"{run.path.resolve()}\n{run.manifest['created']}".encode()).hexdigest()
    return f"{run.experiment.name}-{digest[:12]}"


# --- watching --------------------------------------------------------------------------------------------------------


class _Watch:
    """Watches the run directory until the ServerApp has written a result."""

    def __init__(
        self, run: Run, control: Control, fleet: Fleet | None, stop: Callable[[], bool], progress: Progress
    ) -> None:
        self._run, self._control, self._fleet = run, control, fleet
        self._stop, self._progress = stop, progress
        self._reported = {line["round"] for line in run.metrics()}
        self._notices = {*run.manifest["notices"], *private_notices(run)}
        self._asked = self._reached = time.monotonic()
        self._held, self._served, self._size = False, False, 0
        self._read: tuple[int, dict[str, Any]] | None = None
        self._away = False
        self._missing, self._looked = Missing(progress.notice), self._asked
        progress.started(run, run.experiment.method.rounds, max(self._reported, default=0))

    @property
    def last_complete_round(self) -> int:
        """The last complete round that this process has seen; -1 if there is none."""
        return max(self._reported, default=-1)

    def follow(self, run_id: int) -> dict[str, Any]:
        """Wait for the run's result and return it.

        Raises:
            _Lost: the run ended without a result, for example because the SuperLink or ServerApp was killed.
            InputError: the ServerApp refused the experiment.
            RunError: the run failed, or a process on which it depends has ended.
            Interrupted: the user stopped the run.
        """
        try:
            while True:
                result = self._manifest()["result"]
                self._tell()
                if result is not None:
                    return dict(result)
                self._check(run_id)
                if self._stop():
                    raise Interrupted
                time.sleep(_POLL)
        except BaseException:
            with contextlib.suppress(Exception):
                self._control.stop(run_id)
            raise

    def _manifest(self) -> dict[str, Any]:
        """The manifest, read again if it has changed."""
        stamp = (self._run.path / "manifest.json").stat().st_mtime_ns
        if self._read is None or self._read[0] != stamp:
            self._read = (stamp, Run.open(self._run.path).manifest)
        return self._read[1]

    def _tell(self) -> None:
        """Report changes in the run directory to the progress object."""
        log = self._run.path / "metrics.jsonl"
        size = log.stat().st_size if log.exists() else 0
        lines, self._size = self._run.metrics() if size != self._size else [], size
        for line in lines:
            if line["round"] not in self._reported:
                self._reported.add(line["round"])
                for left_out in failures.of_line(line):
                    self._progress.excluded(left_out)
                self._progress.round(line)
        for notice in (*self._manifest()["notices"], *private_notices(self._run)):
            if notice not in self._notices:
                self._notices.add(notice)
                self._progress.notice(notice)

    def _check(self, run_id: int) -> None:
        """Raise an error if the run failed, or if no process works on it."""
        self._outcome(run_id)
        if self._fleet is not None:
            self._fleet.check(self._progress.notice)
        elif time.monotonic() - self._looked > _LOOK:
            self._looked = time.monotonic()
            self._tell_missing()
        held = server_app.is_served(self._run.path, run_id)
        gone, self._held, self._served = self._held and not held, held, self._served or held
        if gone or time.monotonic() - self._asked > 2.0:
            status, details = self._status(run_id)
            if gone or status == "finished":
                time.sleep(0.5)  # until the last writes become visible
                self._outcome(run_id)
                if Run.open(self._run.path).manifest["result"] is None:
                    if self._fleet is None and self._served and not details.startswith("stopped"):
                        raise _Lost(self._ending(gone, details))
                    raise RunError(self._ending(gone, details))

    def _status(self, run_id: int) -> tuple[str, str]:
        """The run's status at the SuperLink; ("", "") while the connection is down, for at most ``_AWAY`` seconds.

        On a busy machine the SuperLink may close a connection, so a single failed request means nothing.
        :meth:`Fleet.check` detects the end of a SuperLink that this process started.
        """
        self._asked = time.monotonic()
        try:
            status = self._control.status(run_id)
        except RunError:
            if time.monotonic() - self._reached > _AWAY:
                raise
            if not self._away:
                self._away = True
                self._progress.notice("the SuperLink does not answer; the run continues when it does")
            return "", ""
        if self._away:
            self._progress.notice("the SuperLink answers again")
        self._reached, self._away = time.monotonic(), False
        return status

    def _tell_missing(self) -> None:
        """Report which silos the run waits for."""
        waiting = waiting_file.read(self._run.path)
        if waiting is None:
            return
        names = {node: name for name, node in waiting.asked.items()}
        with contextlib.suppress(RunError):
            look = bool(waiting.missing) or self._missing.any
            nodes = [node for node in self._control.nodes() if node.id in names] if look else []
            here = [replace(n, name=names[n.id], online=n.online or names[n.id] not in waiting.missing) for n in nodes]
            self._missing.tell(here, left_out=not all(node.online for node in nodes))

    def _ending(self, gone: bool, details: str) -> str:
        if not gone and not self._served and self._fleet is None:
            return (
                f"the run ended ({details}) but the ServerApp has not written {self._run.path}; the ServerApp must "
                "share this folder with the machine that submitted the run, and have this version of fedfm installed"
            )
        return f"the ServerApp's process ended before the run did ({details or 'killed'})"

    def _outcome(self, run_id: int) -> None:
        path = self._run.path / server_app.OUTCOME
        outcome = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if outcome.get("run") == run_id:  # ignore the outcome of a former ServerApp
            raise InputError(outcome["text"]) if outcome["kind"] == "InputError" else RunError(outcome["text"])
