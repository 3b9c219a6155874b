"""A client's memory between messages, on the client's own disk; the server's between rounds is kept in the same way.

Every (round, call) that writes makes a version of its own, and reads see the newest version before it. A server that
was killed and asks the same round again therefore finds each client exactly as it was: nothing has to be rolled back.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

from fedfm import store

_NAME = re.compile(r"r(\d{7})c(\d{5})\.safetensors")
BACK = 2  # rounds: the newest checkpoint is of the round before, and if it is damaged the one before is gone on from


entropy = os.urandom  # tests put something else here


def secret(root: Path, client: str, name: str) -> bytes:
    """32 bytes, drawn once and kept beside the client's memory.

    Not versioned: a round that is asked again after a crash must release the same noise, not a second sample of it.
    """
    path = secret_file(root, client, name)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        store.write_atomic(path, entropy(32), 0o600)
        return path.read_bytes()


def secret_file(root: Path, client: str, name: str) -> Path:
    """Where :func:`secret` keeps it."""
    return root / store.safe_name(client) / f"{name}.secret"


def of_server(private: Path) -> Callable[[int], MutableMapping[str, Any]]:
    """The server's own memory by round, in the run's private folder."""
    return lambda t: DiskMemory(private, "server", (t, 0))


class DiskMemory(MutableMapping[str, Any]):
    """Loaded on first use, written by :meth:`commit` if it changed. A failed handler never commits.

    Args:
        root: of all clients' memories; each has a folder of its own, made when something is written.
        version: (round, call) of the message that is being handled.
    """

    def __init__(self, root: Path, client: str, version: tuple[int, int]) -> None:
        self._root, self._client, self._version = root, client, version
        self._values: dict[str, Any] | None = None
        self._changed = False

    @functools.cached_property
    def _folder(self) -> Path:
        return self._root / store.safe_name(self._client)

    def _versions(self) -> list[tuple[int, int]]:
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(p.name) for p in self._folder.iterdir())
        return sorted((int(m[1]), int(m[2])) for m in found if m)

    def _path(self, version: tuple[int, int]) -> Path:
        return self._folder / f"r{version[0]:07d}c{version[1]:05d}.safetensors"

    def _load(self) -> dict[str, Any]:
        if self._values is None:
            self._values = {}
            for version in reversed([v for v in self._versions() if v < self._version]):
                if (value := store.load(self._path(version), None)) is not None:
                    self._values = value
                    break
        return self._values

    def commit(self) -> None:
        """Write this version if anything changed, and drop versions that no resume can need."""
        if not self._changed:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        store.save(self._path(self._version), self._values, 0o600, sync=False)
        versions = self._versions()
        for version in set(versions) - self._needed(versions):
            self._path(version).unlink(missing_ok=True)

    def _needed(self, versions: list[tuple[int, int]]) -> set[tuple[int, int]]:
        """Versions that a request may read again: those of this round, since one of it may be repeated, and what the
        first request after each of the last rounds finds.
        """
        t = self._version[0]
        past = [v for v in versions if v <= self._version]
        found = {version for version in past if version[0] == t}
        for last in range(t - BACK, t):
            found.update([v for v in past if v[0] <= last][-1:])
        return found

    def __getitem__(self, key: str) -> Any:
        return self._load()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._load()[key] = value
        self._changed = True

    def __delitem__(self, key: str) -> None:
        del self._load()[key]
        self._changed = True

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())
