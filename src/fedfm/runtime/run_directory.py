"""A run directory: the experiment, the logs and results of a run, and all files that a resume needs.

``manifest.json`` exists before the first round. After every round, ``commit`` writes a checkpoint atomically; this
completes the round. :mod:`fedfm.runtime.logs` writes lines before and after a commit. A run may be killed at any time:
a resume continues after the last commit, and cuts off later lines of the logs.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.checks import conform
from fedfm.core.federation import Federation
from fedfm.core.locks import Lock
from fedfm.core.messages import Excluded
from fedfm.core.text import safe_name, to_json
from fedfm.core.transcript import MANY
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.runtime import file_integrity, logs
from fedfm.runtime.run_folder import (
    LOCK,
    MANIFEST,
    claim,
    new_manifest,
    own_place,
    read_manifest,
    refuse_used,
    settings_of_rounds,
)

# Temporary files that a killed process may leave.
_PARTS = [".manifest.json.*", ".metrics.jsonl.*", ".messages.jsonl.*", ".*.npz.*", "arrays/.*", "checkpoint/.*"]
_PARTS += ["private/checkpoint/.*", "private/server/.*", "private/memory/*/.*", "private/+kept/*/.*"]
_PARTS += ["private/memory/+kept/*/.*", "private/+store/*/.*", "private/memory/+store/*/.*"]
_PARTS += ["private/folder/*/.*", "private/folder/*/*/.*", "private/.underway.json.*", "private/underway/.*"]
KEEP = 2  # number of checkpoints that are kept: the newest, and as a reserve the one before it


class Run:
    """One run directory.

    Attributes:
        path: the folder.
        manifest: contents of ``manifest.json``.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.seconds = 0.0  # seconds that the run took in earlier processes
        self._lock: Lock | None = None  # the lock of a new run, from its creation until its first use
        self._within = False  # whether this process has locked the run

    @functools.cached_property
    def experiment(self) -> Experiment:
        """The experiment of the run; a method of the user's own is imported."""
        return Experiment.from_dict(self.manifest["experiment"], imports=True)

    def __repr__(self) -> str:
        state = "not finished" if self.manifest["result"] is None else "finished"
        return f"<Run {str(self.path)!r}: {self.experiment.name}, {self.experiment.method_name}, {state}>"

    @classmethod
    def create(cls, experiment: Experiment, out: Path | None = None) -> Run:
        """Make the folder and its manifest. The run stays locked until its first :meth:`lock` ends.

        Raises:
            InputError: the folder contains a run or something else, or another process is making a run in it.
        """
        out = own_place(experiment.name) if out is None else out
        refuse_used(out)  # check before anything is made in the folder
        lock = claim(out, experiment.run.shared)
        try:
            refuse_used(out)  # another process may have used the folder in the meantime
            run = cls(out, new_manifest(experiment))
            run._lock = lock
            (out / "checkpoint").mkdir(exist_ok=True)
            run.write_manifest()
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, path: str | Path, *, imports: bool = True) -> Run:
        """Open an existing run.

        Args:
            imports: whether to read the experiment now, which imports a method of the user's own.

        Raises:
            InputError: the folder has no run, the run is damaged, or another release wrote it.
        """
        run = cls(Path(path), read_manifest(Path(path)))
        if imports:
            _ = run.experiment
        return run

    @contextlib.contextmanager
    def lock(self, *, wait: bool = False) -> Iterator[None]:
        """A context in which this process has locked the run; the manifest, which may have changed, is read again.

        The lock ends with the process, even if the process is killed. If this object has the lock already, nothing
        happens.

        Args:
            wait: whether to wait until the lock is free.

        Raises:
            InputError: another process has the lock, an unfinished run has lost its ``private/``, or one of its files
                is a link.
        """
        if self._within:
            yield
            return
        self.refuse_links()
        private = self.path / "private"
        if not private.is_dir() and self.manifest["result"] is None:
            raise InputError(
                f"{private} is missing, and a run cannot continue without its clients' memories and its secrets; put "
                "this folder back"
            )
        fresh = self._lock is not None
        lock, self._lock = self._lock or self._acquire_lock(wait), None
        self._within = True
        try:
            if not fresh:
                self.reload()
            yield
        finally:
            self._within = False
            lock.release()

    def _acquire_lock(self, wait: bool) -> Lock:
        """Acquire the lock for this process.

        Raises:
            InputError: another process has the lock.
        """
        lock = Lock(self.path / "private" / LOCK)
        try:
            lock.path.parent.mkdir(mode=0o700, exist_ok=True)
            taken = lock.take(wait=wait)
        except OSError as error:
            raise InputError(f"{lock.path}: cannot be locked: {error.strerror}") from None
        if not taken:
            raise InputError(f"{self.path}: another process is running this run")
        return lock

    def reload(self) -> None:
        """Read the manifest again.

        Raises:
            InputError: for the reasons of :meth:`open`.
        """
        self.manifest = read_manifest(self.path)
        if self.__dict__.pop("experiment", None) is not None:
            _ = self.experiment

    def discard(self) -> None:
        """Remove a run that this process made and locked; the lock file is removed last, which frees the folder."""
        storage.discard(self.path, (MANIFEST, "checkpoint", "private"), self.path / "private" / LOCK)

    def refuse_links(self) -> None:
        """Refuse links, so that a run directory from elsewhere cannot make this process write to other files.

        Top-level folders, such as ``checkpoint``, may be links to another disk.

        Raises:
            InputError: a file, or a folder further down, is a link.
        """
        for folder, folders, files in os.walk(self.path):
            here = Path(folder)
            below = folders if here != self.path else ()
            for path in (here / name for name in (*below, *files)):
                if path.is_symlink():
                    raise InputError(f"{path} is a link: the run would write to {os.readlink(path)}; remove the link")

    def adapter(self, client: str = "", *, last: bool = False) -> Path:
        """Return the folder of a client's trained model; the client "" means the one model of all clients.

        Args:
            last: return the folder of the last round's model, even if ``run.patience`` chose another round's model.
        """
        root = self.path / "last" if last else self.path
        return root / (f"clients/{safe_name(client)}/adapter" if client else "adapter")

    def write_manifest(self) -> None:
        """Replace ``manifest.json``."""
        manifest = self.manifest
        if len(manifest["clients"]) > MANY:
            from fedfm.runtime.short_names import with_short_names

            manifest = with_short_names(manifest)
        text = to_json(manifest, indent=1)
        storage.write_atomic(self.path / MANIFEST, logs.to_bytes(text + "\n"))

    # --- commits -----------------------------------------------------------------------------------------------------

    def commit(
        self,
        t: int,
        state: Any,
        fed: Federation,
        seconds: float,
        extra: Mapping[str, Any] | None = None,
        spared: int | None = None,
    ) -> None:
        """Complete round t, so that a resumed run continues after it.

        Args:
            extra: further entries of the checkpoint.
            spared: a round whose checkpoint is kept, even if it is not one of the newest.
        """
        length = self.note_messages(fed)
        record = {
            "round": t,
            "call": fed.call,
            "state": state,
            "bytes_up": fed.transcript.bytes_up,
            "bytes_down": fed.transcript.bytes_down,
            "messages": length,
            "seconds": seconds,
            "excluded": [asdict(e) for e in fed.excluded],
            "cohort": list(fed.cohort),
            "underway": {client: list(at) for client, at in fed.in_flight.items()},
            "metrics": dict(fed.metrics),
            "extra": dict(extra or {}),
            "experiment": to_json(settings_of_rounds(self.manifest["experiment"])),
            "kept": file_integrity.parties(self.path / "private"),
        }
        self._folder.mkdir(mode=0o700, exist_ok=True)
        storage.save(self.checkpoint(t), record, 0o600 if self._folder.parent != self.path else 0o666)
        for path in self._checkpoints()[:-KEEP]:
            if spared is None or path != self.checkpoint(spared):
                path.unlink(missing_ok=True)

    def begin(self, t: int) -> None:
        """Record in the ledger that round t begins, if a repeated round would be one more release."""
        if self.experiment.aggregation.mechanism.fresh:
            self.manifest["ledger"]["begun"] = t + self.repeat_count(t - 1)
            self.write_manifest()

    def repeat_count(self, t: int) -> int:
        """Return the number of rounds that began but were not completed; each of them is one more release."""
        return max(int(self.manifest["ledger"].get("begun", 0)) - t, 0)

    def note_messages(self, fed: Federation) -> int:
        """Append the messages since the last call to ``messages.jsonl``; return the file's length."""
        sent = fed.transcript.drain()
        lines: Iterable[str] = (crossing.line() for crossing in sent)
        if len(sent) > 2 * MANY:  # a line then stands for all messages that are alike
            from fedfm.core.grouped_messages import group

            lines = group(sent)
        text = "".join(line + "\n" for line in lines)
        return logs.append(self.path / logs.MESSAGES, text)

    def newest(self, *, mapped: bool = False) -> tuple[dict[str, Any] | None, list[Path]]:
        """Return the newest undamaged checkpoint and the damaged files of later checkpoints. No file is changed.

        The state in the checkpoint is not checked.
        """
        damaged: list[Path] = []
        for path in reversed(self._checkpoints()):
            record = storage.load(path, mapped=mapped)
            if record is not None:
                return dict(record), damaged
            damaged.append(path)
        return None, damaged

    def restore(self, state_type: Any) -> dict[str, Any] | None:
        """Go back to the newest undamaged checkpoint and return it; None before the first commit.

        The method cuts off later lines of the logs, and removes damaged checkpoints and temporary files of killed
        processes. The manifest gets notices about the round after which the run continues, and about lost lines.
        """
        for path in (path for pattern in _PARTS for path in self.path.glob(pattern)):
            path.unlink(missing_ok=True)
        record, damaged = self.newest()
        if record is not None:
            record["state"] = conform(record["state"], state_type, "state")
        for path in damaged:
            path.unlink(missing_ok=True)
        t = -1 if record is None else record["round"]
        last = max((line["round"] for line in self.metrics()), default=-1)
        if damaged:
            self._note_rollback([path.name for path in damaged], "damaged", t)
        elif last > t:
            self._note_rollback([self.checkpoint(last).name], "missing", t)
        for gap in logs.cut(self.path, record):
            self.note(gap)
        return record

    def _note_rollback(self, names: Sequence[str], how: str, t: int) -> None:
        what = f"{' and '.join(names)} {'was' if len(names) == 1 else 'were'} {how}"
        self.note(f"{what}: the run {f'continues after round {t}' if t >= 0 else 'starts over'}")

    def note(self, notice: str) -> None:
        """Add a notice to the manifest, unless the manifest has it already."""
        if notice not in self.manifest["notices"]:
            self.manifest["notices"].append(notice)

    def state(self, state_type: Any, *, mapped: bool = False) -> Any:
        """Return the server's state after the last committed round, even if the run is finished; no file changes.

        Args:
            mapped: see :func:`fedfm.core.storage.load`.

        Raises:
            InputError: the checkpoint is damaged or missing.
        """
        record, damaged = self.newest(mapped=mapped)
        result = self.manifest["result"]
        if record is None or (result is not None and record["round"] != result["rounds"]):
            path = next(iter(damaged), self._folder if result is None else self.checkpoint(result["rounds"]))
            raise InputError(
                f"{path} {'is damaged' if path in damaged else 'is missing'}: put back a copy of its files, or run the "
                "experiment again in another folder"
            )
        return conform(record["state"], state_type, "state")

    def state_of(self, t: int, state_type: Any) -> Any | None:
        """Return the server's state after round t; None if its checkpoint is missing or damaged."""
        record = storage.load(self.checkpoint(t))
        return None if record is None else conform(record["state"], state_type, "state")

    def into(self, fed: Federation, record: Mapping[str, Any]) -> None:
        """Put the values of a restored checkpoint into a federation."""
        fed.begin(record["round"])
        fed.call = record.get("call", 0)  # so the next requests read the memories that this round has written
        fed.transcript.bytes_up, fed.transcript.bytes_down = record["bytes_up"], record["bytes_down"]
        fed.excluded = [Excluded(**e) for e in record["excluded"]]
        fed.cohort = tuple(record["cohort"])
        fed.metrics.update(record["metrics"])
        fed.restore({client: (t, call) for client, (t, call) in record.get("underway", {}).items()})
        self.seconds = record["seconds"]

    def keep_arrays(self, t: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a method's arrays of round t; call it before the round is committed."""
        if arrays:
            (self.path / "arrays").mkdir(exist_ok=True)
            data = io.BytesIO()
            np.savez(data, **arrays)  # type: ignore[arg-type]
            storage.write_atomic(self.path / "arrays" / f"round-{t:06d}.npz", data.getvalue())

    def join_arrays(self, clients: Sequence[str]) -> dict[str, str]:
        """See :func:`fedfm.runtime.round_arrays.join`."""
        if not (self.path / "arrays").is_dir():
            return {}
        from fedfm.runtime import round_arrays

        return round_arrays.join(self.path, clients, self.note)

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``."""
        logs.append(self.path / logs.METRICS, to_json(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Read the undamaged lines of ``metrics.jsonl``; :func:`fedfm.runtime.logs.gaps` lists the missing lines.

        Raises:
            InputError: the file cannot be read.
        """
        return logs.rounds(self.path / logs.METRICS)

    @property
    def _folder(self) -> Path:
        """The folder of the checkpoints.

        If the server mixes a secret foundation model into the aggregate, the folder is in ``private/``: the server's
        moments and control variates reveal the aggregate before the mixture, and thus the foundation model.
        """
        method = self.experiment.method
        more_than_the_model = method.state_type is not Params and method.traits.keeps_foundation
        return self.path / ("private/checkpoint" if more_than_the_model else "checkpoint")

    def checkpoint(self, t: int) -> Path:
        """Return the path of round t's checkpoint."""
        return self._folder / f"round-{t:06d}.safetensors"

    def _checkpoints(self) -> list[Path]:
        """Return the paths of all checkpoints, in order of rounds."""
        return sorted(self._folder.glob("round-*.safetensors"))
