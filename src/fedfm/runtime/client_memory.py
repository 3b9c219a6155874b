"""Memory of a client between messages, on the client's disk, and memory of the server between rounds.

Each request, identified by (round, call), writes its own version of a memory, and reads the newest earlier one. So if a
server was killed and repeats a round, each client reads its state from before that round, and no write is undone.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fedfm.core import storage
from fedfm.core.text import safe_name
from fedfm.runtime import file_integrity
from fedfm.runtime.file_integrity import SECRET, version_name, version_of

ROUNDS, CALLS = 10**7 - 1, 10**5 - 1  # largest round and call that fit into a version's name
BACK = 2  # a resume may go back this many rounds: to the newest checkpoint or, if it is damaged, the one before

FIRSTS, STORES = "+first", "+store"  # names that no party's folder can have, see LISTS in file_integrity

entropy = os.urandom  # a name of its own, so that tests can replace it


def secret(root: Path, client: str, name: str) -> bytes:
    """Return 32 random bytes, which are drawn once and stored with the client's memory.

    A secret has no versions: a round that is repeated after a crash must release the same noise, not a second sample.

    Raises:
        Lost: the file is damaged or missing. New bytes would release a second sample of the noise.
    """
    path, names = secret_file(root, client, name), file_integrity.list_of(root, client)
    try:
        found = file_integrity.read_secret(path)
    except FileNotFoundError:
        listed = file_integrity.read_list(names) or set()
        if path.name in listed:
            raise file_integrity.loss_error(path, file_integrity.MISSING, names) from None
        path.parent.mkdir(parents=True, exist_ok=True)
        found = entropy(SECRET)
        storage.write_atomic(path, storage.seal(found), 0o600)
        file_integrity.write_list(names, {*listed, path.name}, sync=True)
    if found is None:
        raise file_integrity.loss_error(path, file_integrity.DAMAGED, names)
    return found


def secret_file(root: Path, client: str, name: str) -> Path:
    """Return the path of the file of a :func:`secret`."""
    return root / safe_name(client) / f"{name}.secret"


def first(root: Path, client: str, name: str, value: bytes) -> bytes:
    """Store a value under a name unless the name has a value already; return the stored value.

    The value is on the disk when the function returns. If several processes store values at the same time, one of these
    values is stored, and all processes get this value.

    Raises:
        Lost: the file of the value is damaged.
    """
    path = root / FIRSTS / safe_name(client) / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{name}.{os.urandom(4).hex()}"
        storage.write_atomic(temporary, storage.seal(value), 0o600)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
        storage.sync_folder(path.parent)
    if (found := storage.unseal(path.read_bytes())) is None:
        raise file_integrity.loss_error(path, file_integrity.DAMAGED, path)
    return found


class Store(MutableMapping[str, bytes]):
    """Values without versions. A value is on the disk when its assignment returns, and a resume does not undo it.

    Args:
        root: folder of all stores; each party has a subfolder, which is made on the first write.
    """

    def __init__(self, root: Path, party: str) -> None:
        self._root, self._party = root, party

    @functools.cached_property
    def _folder(self) -> Path:  # made on first use, since most requests store nothing here
        return self._root / STORES / safe_name(self._party)

    def _path(self, key: str) -> Path:
        return self._folder / safe_name(key)

    def __getitem__(self, key: str) -> bytes:
        path = self._path(key)
        try:
            found = storage.unseal(path.read_bytes())
        except FileNotFoundError:
            raise KeyError(key) from None
        if found is None:
            raise file_integrity.loss_error(path, file_integrity.DAMAGED, path)
        return found

    def __setitem__(self, key: str, value: bytes) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        storage.write_atomic(self._path(key), storage.seal(value), 0o600)

    def __delitem__(self, key: str) -> None:
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[str]:
        names = os.listdir(self._folder) if self._folder.is_dir() else ()
        return iter(sorted(unquote(name) for name in names if not name.startswith(".")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._path(key).exists()


def of_server(private: Path) -> Callable[[int], MutableMapping[str, Any]]:
    """Return a function that opens the server's memory at a round, in the run's private folder."""
    return lambda t: DiskMemory(private, "server", (t, 0))


class DiskMemory(MutableMapping[str, Any]):
    """A memory that is loaded on first use. :meth:`commit` writes a changed memory, and is not called after an error.

    A read raises :class:`~fedfm.errors.Lost` if the required version is damaged or missing. With an older version the
    run would continue from another state without any sign of it.

    Args:
        root: folder of all memories; each party has a subfolder, which is made on the first write.
        version: (round, call) of the current message.
    """

    def __init__(self, root: Path, client: str, version: tuple[int, int]) -> None:
        self._root, self._client, self._version = root, client, version
        self._values: dict[str, Any] | None = None
        self._changed = False

    @functools.cached_property
    def _folder(self) -> Path:
        return self._root / safe_name(self._client)

    @functools.cached_property
    def _list(self) -> Path:
        return file_integrity.list_of(self._root, self._client)

    def _path(self, version: tuple[int, int]) -> Path:
        return self._folder / version_name(version)

    @functools.cached_property
    def _names_in_list(self) -> set[str]:
        return file_integrity.read_list(self._list) or set()

    def _load(self) -> dict[str, Any]:
        if self._values is None:
            versions = map(version_of, file_integrity.files(self._folder) | self._names_in_list)
            newest = max((v for v in versions if v and v < self._version), default=None)
            self._values = {} if newest is None else self._read(self._path(newest))
        return self._values

    def _read(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] | None = storage.load(path, None)
        if found is None:
            raise file_integrity.loss_error(
                path, file_integrity.DAMAGED if path.exists() else file_integrity.MISSING, self._list
            )
        return found

    def commit(self) -> None:
        """Write this version if a value changed, and remove versions that no resume can need any more."""
        if not self._changed:
            return
        if not os.path.isdir(self._folder):
            self._folder.mkdir(parents=True)
        storage.save(self._path(self._version), self._values, 0o600, sync=False)
        versions = {name: version_of(name) for name in file_integrity.files(self._folder) | self._names_in_list}
        known = sorted(v for v in versions.values() if v)
        needed = self._versions_to_keep(known)
        file_integrity.write_list(self._list, (name for name, v in versions.items() if v is None or v in needed))
        for version in set(known) - needed:
            self._path(version).unlink(missing_ok=True)

    def _versions_to_keep(self, versions: list[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return the needed versions: all of this round, and the last at the end of each of BACK earlier rounds."""
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
