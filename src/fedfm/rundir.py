"""A run directory: what a run was, what it did, and everything that is needed to go on.

``manifest.json`` is there before the first round. After every round ``commit`` writes a checkpoint atomically; only
then is the round done. ``metrics.jsonl`` gets a line when a committed round has been evaluated, ``messages.jsonl``
the round's crossings just before its commit. A run that was killed at any moment is opened again at its last commit,
and lines that belong to nothing committed are cut off.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import io
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fedfm import __version__, store
from fedfm.conform import conform
from fedfm.errors import InputError
from fedfm.experiment import Experiment
from fedfm.federation import Excluded, Federation
from fedfm.params import Params
from fedfm.writing import to_json

SCHEMA = 1
_NEEDED = {"clients", "experiment", "fingerprints", "ledger", "model", "notices", "result", "split"}  # of a manifest
# Files that a killed process may leave half-written.
_PARTS = (
    ".manifest.json.*",
    ".metrics.jsonl.*",
    ".*.npz.*",
    "checkpoint/.*",
    "private/checkpoint/.*",
    "arrays/.*",
    "private/server/.*",
    "private/memory/*/.*",
)
KEEP = 2  # checkpoints: the newest, and one to fall back on
DO_NOT_SHARE = (
    "private/ holds clients' memories and keys: never share it.",
    "clients/ holds one model per client: each was fitted to that client's rows and tells about them.",
    "checkpoint/, adapter/ and metrics.jsonl tell about the clients' data as far as the trained model and the "
    "per-client accuracies do; what the ledger promises covers the method's own messages, not the scores and not "
    "the split in this manifest.",
    "audit.json names single training rows, and says how far a foundation model that the server keeps is from what was "
    "sent; of the latter report.html tells, too, once the run was audited.",
    "weights.npz, arrays/ and the map in report.html, where a method weighs clients against each other, say whose rows "
    "resemble whose.",
)


class Run:
    """One run directory.

    Attributes:
        path: the folder.
        experiment: what runs.
        manifest: contents of ``manifest.json``.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.experiment = Experiment.from_dict(manifest["experiment"])
        self.seconds = 0.0  # spent before this process

    def __repr__(self) -> str:
        state = "not finished" if self.manifest["result"] is None else "finished"
        return f"<Run {str(self.path)!r}: {self.experiment.name}, {self.experiment.method_name}, {state}>"

    @classmethod
    def create(cls, experiment: Experiment, out: Path | None = None) -> Run:
        """Make the folder and its manifest.

        Raises:
            InputError: the folder holds a run already, or something else.
        """
        if out is None:
            stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
            out = Path("runs") / f"{experiment.name}-{stamp}"
        if (out / "manifest.json").exists():
            raise InputError(f"{out} holds a run already: `fedfm resume {out}` goes on with it, or give another --out")
        if not store.free(out, "manifest.json", ("checkpoint", "private")):
            raise InputError(f"{out} is there and is not an empty folder; give another --out")
        try:
            for folder in ("checkpoint", "private"):
                (out / folder).mkdir(parents=True, exist_ok=True)
            (out / "private").chmod(0o700)
        except OSError as error:
            raise InputError(f"{out}: cannot be made: {error.strerror}") from None
        run = cls(out, _manifest(experiment))
        run.write_manifest()
        return run

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """A run that is there.

        Raises:
            InputError: no run, or one written by a later release.
        """
        path = Path(path)
        try:
            manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{path}: no run here (manifest.json is missing)") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{path}/manifest.json cannot be read: {error}") from None
        if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
            schema = manifest.get("schema") if isinstance(manifest, dict) else None
            raise InputError(f"{path}: schema {schema}; this release reads {SCHEMA}: use the fedfm that wrote it")
        if missing := sorted(_NEEDED - manifest.keys()):
            raise InputError(f'{path}/manifest.json is damaged: "{missing[0]}" is missing')
        return cls(path, manifest)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Two processes never write one run. The lock goes with the process, however that ends.

        Raises:
            InputError: another process has it, an unfinished run has lost what its clients and it keep, or one of
                its files is a link to elsewhere.
        """
        self.refuse_links()
        private = self.path / "private"
        if not private.is_dir() and self.manifest["result"] is None:
            raise InputError(f"{private} is missing: a run cannot go on without its clients' memories and its secrets")
        private.mkdir(mode=0o700, exist_ok=True)
        with open(self.path / "private" / "lock", "w", opener=store.private) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InputError(f"{self.path}: another process is running this run") from None
            yield

    def refuse_links(self) -> None:
        """A run directory that comes from elsewhere does not say which of our other files are written.

        Its own folders may lie on another disk, ``checkpoint`` for example.

        Raises:
            InputError: what is in it is a link.
        """
        for folder, folders, files in os.walk(self.path):
            here = Path(folder)
            below = folders if here != self.path else ()
            for path in (here / name for name in (*below, *files)):
                if path.is_symlink():
                    raise InputError(
                        f"{path} is a link: going on would write to {os.readlink(path)}; take the link out"
                    )

    def adapter(self, client: str = "") -> Path:
        """Where the trained model is: a client's own, or the one for all under ""."""
        return self.path / (f"clients/{store.safe_name(client)}/adapter" if client else "adapter")

    def write_manifest(self) -> None:
        """Replace ``manifest.json``."""
        text = to_json(self.manifest, indent=1)
        store.write_atomic(self.path / "manifest.json", _bytes(text + "\n"))

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
        """Round t is done: from here on a resumed run continues after it.

        Args:
            spared: a round whose checkpoint stays beside the newest ones.
        """
        length = self.note_messages(fed)
        record = {
            "round": t,
            "state": state,
            "bytes_up": fed.transcript.bytes_up,
            "bytes_down": fed.transcript.bytes_down,
            "messages": length,
            "seconds": seconds,
            "excluded": [asdict(e) for e in fed.excluded],
            "cohort": list(fed.cohort),
            "metrics": dict(fed.metrics),
            "extra": dict(extra or {}),
        }
        self._folder.mkdir(mode=0o700, exist_ok=True)
        store.save(self._checkpoint(t), record, 0o600 if self._folder.parent != self.path else 0o666)
        for path in self._checkpoints()[:-KEEP]:
            if spared is None or path != self._checkpoint(spared):
                path.unlink(missing_ok=True)

    def note_messages(self, fed: Federation) -> int:
        """Append the crossings since the last call; returns the file's length."""
        return self._append("messages.jsonl", "".join(crossing.line() + "\n" for crossing in fed.transcript.drain()))

    def restore(self, state_type: Any) -> dict[str, Any] | None:
        """The newest checkpoint that is whole; None before the first commit. Later lines of the logs are cut off.

        A damaged checkpoint is passed over for the one before, and the manifest says where the run goes on. What a
        killed process has left half-written goes.
        """
        damaged = []
        for path in (path for pattern in _PARTS for path in self.path.glob(pattern)):
            path.unlink(missing_ok=True)
        for path in reversed(self._checkpoints()):
            record = store.load(path)
            if record is None:
                damaged.append(path.name)
                path.unlink(missing_ok=True)
                continue
            record["state"] = conform(record["state"], state_type, "state")
            self._went_back(damaged, f"goes on after round {record['round']}")
            self._keep_metrics(record["round"])
            judged = any(line["round"] == record["round"] for line in self.metrics())
            self._keep_messages(record["messages"], record["round"] if judged else None)
            return dict(record)
        self._went_back(damaged, "starts over")
        self._keep_messages(0, None)
        self._keep_metrics(-1)
        return None

    def _went_back(self, damaged: Sequence[str], how: str) -> None:
        if damaged:
            names = f"{' and '.join(damaged)} {'was' if len(damaged) == 1 else 'were'}"
            self.manifest["notices"].append(f"{names} damaged: the run {how}")

    def state(self, state_type: Any) -> Any:
        """The server's state after the last committed round; nothing is changed.

        Raises:
            InputError: no checkpoint can be read.
        """
        for path in reversed(self._checkpoints()):
            if (record := store.load(path)) is not None:
                return conform(record["state"], state_type, "state")
        raise InputError(
            f"{self._folder}: no checkpoint can be read: put back a copy of its files, or run the "
            "experiment again in another folder"
        )

    def state_of(self, t: int, state_type: Any) -> Any | None:
        """The server's state after round t; None where its checkpoint is gone or damaged."""
        record = store.load(self._checkpoint(t))
        return None if record is None else conform(record["state"], state_type, "state")

    def into(self, fed: Federation, record: Mapping[str, Any]) -> None:
        """Give a federation the counts of a restored checkpoint."""
        fed.begin(record["round"])
        fed.transcript.bytes_up, fed.transcript.bytes_down = record["bytes_up"], record["bytes_down"]
        fed.excluded = [Excluded(**e) for e in record["excluded"]]
        fed.cohort, fed.metrics = tuple(record["cohort"]), dict(record["metrics"])
        self.seconds = record["seconds"]

    def keep_arrays(self, t: int, arrays: Mapping[str, np.ndarray]) -> None:
        """What a method has to show of round t; written before the round is committed, and again if it is repeated."""
        if arrays:
            (self.path / "arrays").mkdir(exist_ok=True)
            data = io.BytesIO()
            np.savez(data, **arrays)  # type: ignore[arg-type]
            store.write_atomic(self.path / "arrays" / f"round-{t:06d}.npz", data.getvalue())

    def join_arrays(self, clients: Sequence[str]) -> dict[str, str]:
        """A file a name: the rounds' arrays stacked, with ``rounds``, ``clients`` and the arrays of text."""
        by_round = {int(path.stem.rpartition("-")[2]): path for path in sorted(self.path.glob("arrays/round-*.npz"))}
        if not by_round:
            return {}
        loaded = {t: dict(np.load(path, allow_pickle=False)) for t, path in by_round.items()}
        last = loaded[max(loaded)]
        text = {name: x for name, x in last.items() if x.dtype.kind == "U"}
        files = {}
        for name in last.keys() - text.keys():
            stacked = np.stack([arrays[name] for arrays in loaded.values()])
            data = io.BytesIO()
            named: dict[str, Any] = {name: stacked, "rounds": np.array(list(loaded)), "clients": np.array(clients)}
            np.savez_compressed(data, **named, **text)
            store.write_atomic(self.path / f"{name}.npz", data.getvalue())
            files[name] = f"{name}.npz"
        return files

    def log(self, line: Mapping[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``."""
        self._append("metrics.jsonl", to_json(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``; a torn last line is left out.

        Raises:
            InputError: another line is damaged, or the file cannot be read.
        """
        path = self.path / "metrics.jsonl"
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else []
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        for number, line in enumerate(lines[:-1], 1):
            if line and _round(line) is None:
                raise InputError(f"{path}, line {number} is damaged: take it out, and the run can go on without it")
        return [json.loads(line) for line in lines[:-1] if line]

    @property
    def _folder(self) -> Path:
        """Of the checkpoints. Moments and control variates give the aggregate away, and with it a foundation model that
        the server mixes in and keeps: such a state is as secret as the key.
        """
        method = self.experiment.method
        more_than_the_model = method.keeps_foundation and method.state_type is not Params
        return self.path / ("private/checkpoint" if more_than_the_model else "checkpoint")

    def _checkpoint(self, t: int) -> Path:
        return self._folder / f"round-{t:06d}.safetensors"

    def _checkpoints(self) -> list[Path]:
        """In order of rounds; earlier releases had all of them in ``checkpoint/``."""
        folders = {self.path / "checkpoint", self._folder}
        return sorted((path for folder in folders for path in folder.glob("round-*.safetensors")), key=lambda p: p.name)

    def _append(self, name: str, text: str) -> int:
        path = self.path / name
        try:
            with open(path, "ab") as file:
                file.write(_bytes(text))
                return file.tell()
        except OSError as error:
            raise store.not_written(path, error) from error

    def _keep_messages(self, length: int, judged: int | None) -> None:
        """Cut ``messages.jsonl`` after a commit; what judged that round's models stays, if its metrics are there."""
        path = self.path / "messages.jsonl"
        if not path.exists() or path.stat().st_size <= length:
            return
        with open(path, "rb") as file:
            file.seek(length)
            for line in file if judged is not None else ():
                if not line.endswith(b"\n") or _round(line) != judged:
                    break
                length += len(line)
        os.truncate(path, length)

    def _keep_metrics(self, last: int) -> None:
        path = self.path / "metrics.jsonl"
        if path.exists():
            kept = [m for m in self.metrics() if m["round"] <= last]
            text = "".join(to_json(m) + "\n" for m in kept)
            if _bytes(text) != path.read_bytes():
                store.write_atomic(path, _bytes(text))


def _bytes(text: str) -> bytes:
    """UTF-8. What has no place in it, as in names of files that were none, stands as JSON's escape."""
    return text.encode("utf-8", "backslashreplace")


def _round(line: bytes) -> int | None:
    """Of a line of a log; None where it is damaged."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found["round"] if isinstance(found, dict) and isinstance(found.get("round"), int) else None


def _manifest(experiment: Experiment) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "fedfm": __version__,
        "name": experiment.name,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "finished": None,
        "experiment": experiment.to_dict(),
        "versions": versions(),
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "fingerprints": {},
        "split": None,
        "clients": [],
        "attackers": [],
        "model": None,
        "notices": [],
        "result": None,
        "ledger": {"epsilon": None, "entries": [{"what": "tuning", **trial} for trial in experiment.tuning]},
        "do_not_share": list(DO_NOT_SHARE),
    }


def versions() -> dict[str, str]:
    """Of Python and the libraries that decide about bits."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("fedfm", "torch", "transformers", "peft", "flwr", "numpy", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
