"""Integrity of the files that a party (a client or the server) cannot make again: its secrets and its memory.

The files of a party are in ``ROOT/<party>/``. Each file has a checksum, which shows damage. It also has an entry in the
list ``ROOT/+kept/<party>/list``, which shows that a file is missing. The list is written after a new file is written,
and before an old file is removed. So if a process is killed in between, the list may lack an existing file, but no
listed file is missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fedfm.core import storage
from fedfm.core.text import safe_name
from fedfm.errors import Lost

DAMAGED, MISSING = "is damaged", "is missing"
LISTS = "+kept"  # no party's folder has this name: names of parties' folders never begin with "+"
SECRET = 32  # length of a secret in bytes
_ROOM, _PAGE = (
    448,
    4096,
)  # in bytes: padded length of the names in a list, and length of a page, which the system writes at once
_VERSION = re.compile(r"r(\d{7})c(\d{5})\.safetensors")


def version_name(version: tuple[int, int]) -> str:
    """Return the name of the file that has the memory after (round, call)."""
    return f"r{version[0]:07d}c{version[1]:05d}.safetensors"


def version_of(name: str) -> tuple[int, int] | None:
    """Parse (round, call) from the name of a memory's file; None for any other file.

    Example:
        >>> version_of(version_name((3, 1))), version_of("noise.secret")
        ((3, 1), None)
    """
    found = _VERSION.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def list_of(root: Path, party: str) -> Path:
    """Return the path of a party's list."""
    return root / LISTS / safe_name(party) / "list"


def read_list(path: Path) -> set[str] | None:
    """Return the names of the files in a list; None if the list does not exist.

    Raises:
        Lost: the list is damaged.
    """
    try:
        text = storage.unseal(path.read_bytes())
    except FileNotFoundError:
        return None
    if text is None:
        raise loss_error(path, DAMAGED, path)
    return {name for name in text.decode().split("\n") if name}


def write_list(path: Path, names: Iterable[str], sync: bool = False) -> None:
    """Replace a list atomically.

    An existing list is overwritten in place, by one write within one page. Writing a new file and renaming it would
    take a few milliseconds, because common file systems first write the new file to the disk.
    """
    sealed = storage.seal("\n".join(sorted(names)).encode().ljust(_ROOM, b"\n"))
    try:
        if os.path.getsize(path) != len(sealed) or len(sealed) > _PAGE or sync:
            storage.write_atomic(path, sealed, 0o600, sync)
            return
        with open(path, "r+b", buffering=0) as file:
            file.write(sealed)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_atomic(path, sealed, 0o600, sync)
    except OSError as error:
        raise storage.not_written(path, error) from error


def files(folder: Path) -> set[str]:
    """Return the names of the memories and secrets in a party's folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return {name for name in names if name.endswith(".secret") or version_of(name)}


def read_secret(path: Path) -> bytes | None:
    """Read a secret; return None if its file is truncated or altered.

    Raises:
        FileNotFoundError: the file does not exist.
    """
    return storage.unseal(path.read_bytes())


def loss_error(path: Path, how: str, list_file: Path) -> Lost:
    """Make the error for a damaged or missing file, which tells the file's owner what to do."""
    remove = f"remove {path} and {list_file}" if path != list_file else "remove it"
    return Lost(f"{path} {how}: put back a copy of it; to continue without its content, {remove}")


# --- all parties of a folder -----------------------------------------------------------------------------------------


def roots(private: Path) -> list[Path]:
    """Return each ROOT below a run's ``private/``: for the server, for clients, and for silos on loopback."""
    return [private, private / "memory", *sorted(private.glob("deployment/sites/*/*/memory"))]


def parties(private: Path) -> list[str]:
    """Return the folders of the parties' lists, relative to ``private/``; a resumed run must find all of them."""
    places = [root / LISTS for root in roots(private)]
    names = {place: os.listdir(place) for place in places if place.is_dir()}
    return sorted(f"{place.relative_to(private)}/{name}" for place, found in names.items() for name in found)


def secrets(private: Path) -> Iterator[Path]:
    """Yield the paths of all parties' secrets below a run's ``private/``."""
    for root in roots(private):
        for party in party_folders(root):
            yield from sorted((root / party).glob("*.secret"))


def party_folders(root: Path) -> list[str]:
    """Return the names of the folders of a root's parties."""
    places = [root / LISTS, *([root] if root.name == "memory" else [])]
    found = {path.name for place in places if place.is_dir() for path in place.iterdir() if path.is_dir()}
    return sorted((found - {LISTS}) | ({"server"} if root.name != "memory" else set()))
