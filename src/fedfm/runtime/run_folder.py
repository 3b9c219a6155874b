"""Claim the folder of a new run: check that it is free, lock it, and write its ``manifest.json``."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.locks import Lock
from fedfm.core.text import from_json
from fedfm.errors import InputError, reason_of
from fedfm.runtime.predictions import personal
from fedfm.runtime.runs_below import no_run
from fedfm.runtime.sharing import do_not_share
from fedfm.version import __version__

SCHEMA = 1
MANIFEST = "manifest.json"
LOCK = "lock"  # name of the lock file in private/
_NEEDED = {
    "clients",
    "experiment",
    "fingerprints",
    "ledger",
    "model",
    "notices",
    "result",
    "split",
}  # keys that every manifest has
_TRIES = 100  # attempts to make a folder, while other processes remove their folders from the same path


def own_place(name: str) -> Path:
    """Return the path of a new folder below ``runs/``."""
    return Path("runs") / f"{name}-{datetime.datetime.now().strftime('%Y%m%d-%H%M%S-%f')[:-3]}"


def refuse_used(out: Path) -> None:
    """Refuse a folder that is not empty, or is inside the directory of a run.

    Raises:
        InputError: the folder contains a run or other files, or belongs to a run.
    """
    for outer in out.resolve().parents:
        if (outer / MANIFEST).exists() and (outer / "private" / LOCK).exists():
            raise InputError(f"{out} is inside the run {outer}, whose files are its own; give another --out")
    if (out / MANIFEST).exists():
        raise InputError(f"{out} contains a run already; continue it with `fedfm resume {out}`, or give another --out")
    if not storage.free(out, MANIFEST, ("checkpoint", "private"), LOCK):
        raise InputError(f"{out} exists and is not an empty folder; give another --out")


def claim(out: Path, shared: bool) -> Lock:
    """Make the folder of a new run and lock it, before anything else is written.

    Args:
        shared: whether other users may read the folder, as the umask permits; only the owner can read ``private/``.

    Raises:
        InputError: the folder cannot be made, or another process has the lock.
    """
    lock = Lock(out / "private" / LOCK)
    try:
        for last in (*(False for _ in range(_TRIES)), True):
            try:
                out.mkdir(mode=0o777 if shared else 0o700, parents=True, exist_ok=True)
                lock.path.parent.mkdir(mode=0o700, exist_ok=True)
                taken = lock.take()
                break
            except FileNotFoundError:  # another process removes this folder, since its own run could not begin
                if last:
                    raise
        if not taken:
            raise InputError(f"{out}: another process is running a run here; give another --out")
        lock.path.parent.chmod(0o700)
    except OSError as error:
        raise InputError(f"{out}: cannot be made: {error.strerror}") from None
    if not shared:
        close_to_others(out)
    return lock


def close_to_others(folder: Path) -> None:
    """Restrict a folder to its owner.

    Raises:
        InputError: the folder belongs to another user.
    """
    try:
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be closed to other users: {error.strerror}; with run.shared = true its permissions stay "
            f"as they are"
        ) from None


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a run.

    Raises:
        InputError: the folder has no run, the run is damaged, or another release wrote it.
    """
    try:
        storage.refuse_pipes(path)
        manifest = from_json((path / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise no_run(path) from None
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path / MANIFEST} cannot be read: {reason_of(error)}") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        schema = manifest.get("schema") if isinstance(manifest, dict) else None
        raise InputError(
            f"{path}: its schema is {schema}, and this release reads {SCHEMA}; use the release that wrote the run"
        )
    if missing := sorted(_NEEDED - manifest.keys()):
        raise InputError(f'{path / MANIFEST} is damaged: "{missing[0]}" is missing')
    result = manifest["result"]
    if result is not None and not (isinstance(result, dict) and {"rounds", "details", "excluded"} <= result.keys()):
        raise InputError(f'{path / MANIFEST} is damaged: "result" lacks entries')
    if isinstance(names := manifest["clients"], list) and any(isinstance(name, list) for name in names):
        from fedfm.runtime.short_names import with_all_names

        return with_all_names(manifest, path / MANIFEST)
    return manifest


def settings_of_rounds(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of an experiment that decide the bits of its rounds: without name and places of rows."""
    data = {key: value for key, value in experiment["data"].items() if key not in ("path", "hub", "clients")}
    return {key: value for key, value in experiment.items() if key != "name"} | {"data": data}


def new_manifest(experiment: Experiment) -> dict[str, Any]:
    """Make the manifest of a run that has not begun yet."""
    return {
        "schema": SCHEMA,
        "fedfm": __version__,
        "name": experiment.name,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "finished": None,
        "experiment": experiment.to_dict(),
        "versions": versions(),
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "device": None,
        "fingerprints": {},
        "split": None,
        "clients": [],
        "attackers": [],
        "model": None,
        "notices": [],
        "lost": [],
        "result": None,
        "ledger": {"epsilon": None, "entries": [{"what": "tuning", **trial} for trial in experiment.tuning]},
        "do_not_share": do_not_share(experiment.privacy, personal(experiment.method)),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, and of the libraries that affect the bits of the result."""
    names = ("fedfm", "torch", "transformers", "peft", "flwr", "numpy", "safetensors")
    installed = {name: version for name in names if (version := _version_of(name))}
    return {"python": sys.version.split()[0]} | installed


@functools.cache
def _version_of(name: str) -> str:
    """Read the version of an installed library from its metadata; "" if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return ""
