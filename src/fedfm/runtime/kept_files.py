"""What a party keeps and cannot make again, its secrets and its memory: a list of the files, and whether each is whole.

A party's files lie in its folder, ``ROOT/<party>/``. Each carries a checksum, which says that it is damaged, and the
list, ``ROOT/+kept/<party>/list``, names it, which says that it is missing. The list is written after the files that it
names and before those go that it leaves out: a process that is killed in between leaves a file too many, never one too
few. Folders that an earlier release wrote have no list, and their secrets no checksum: they are taken as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fedfm.core import storage
from fedfm.errors import Lost

DAMAGED, MISSING = "is damaged", "is missing"
LISTS = "+kept"  # no party's folder: a shortened name alone has a "+", and letters before it
SECRET = 32  # bytes
_ROOM, _PAGE = 448, 4096  # bytes of a list's names, padded; and what the system writes at once
_VERSION = re.compile(r"r(\d{7})c(\d{5})\.safetensors")


def version_name(version: tuple[int, int]) -> str:
    """The file of a memory as (round, call) left it."""
    return f"r{version[0]:07d}c{version[1]:05d}.safetensors"


def version_of(name: str) -> tuple[int, int] | None:
    """(round, call) of a memory's file; None of another.

    Example:
        >>> version_of(version_name((3, 1))), version_of("noise.secret")
        ((3, 1), None)
    """
    found = _VERSION.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def list_of(root: Path, party: str) -> Path:
    """Where a party's list is."""
    return root / LISTS / storage.safe_name(party) / "list"


def listed(path: Path) -> set[str] | None:
    """Names of files that a list says are there; None where there is no list.

    Raises:
        Lost: the list is damaged.
    """
    try:
        text = storage.unseal(path.read_bytes())
    except FileNotFoundError:
        return None
    if text is None:
        raise lost(path, DAMAGED, path)
    return {name for name in text.decode().split("\n") if name}


def write_list(path: Path, names: Iterable[str], sync: bool = False) -> None:
    """Replace a list, whole or not at all, whoever is killed when.

    A list that is there is overwritten in its place, by one write within one page: to replace a file by a renamed one
    costs a few milliseconds on common file systems, which write the new one to the disk first.
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
    """Names of the memories and secrets in a party's folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return set()
    return {name for name in names if name.endswith(".secret") or version_of(name)}


def read_secret(path: Path) -> bytes | None:
    """A secret; None where its file was cut or altered.

    Raises:
        FileNotFoundError: there is none.
    """
    found = path.read_bytes()
    return found if old_secret(found) else storage.unseal(found)


def old_secret(found: bytes) -> bool:
    """Whether an earlier release wrote this: 32 bytes without a checksum."""
    return len(found) == SECRET and not found.startswith(storage.seal(b"")[:8])


def whole(path: Path) -> bool:
    """Whether a memory's or a secret's file is as it was written, as far as it can tell."""
    return storage.whole(path) if version_of(path.name) else read_secret(path) is not None


def lost(path: Path, how: str, list_file: Path) -> Lost:
    """What to say to whom the files belong."""
    remove = f"remove {path} and {list_file}" if path != list_file else "remove it"
    return Lost(f"{path} {how}: put back a copy of it; to go on without what it held, {remove}")


# --- all parties of a folder -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A file that is not what it was.

    Attributes:
        how: what is wrong with it, a predicate.
        root, party: whose it is, by the names of the folders; None where it is no party's.
    """

    path: Path
    how: str
    root: Path | None = None
    party: str = ""

    def forget(self) -> None:
        """Go on without it: a damaged file goes, and the list says what is there."""
        if self.root is None:
            return
        folder, list_file = self.root / self.party, self.root / LISTS / self.party / "list"
        if self.how == DAMAGED:
            self.path.unlink(missing_ok=True)
        write_list(list_file, files(folder), sync=True)


def roots(private: Path) -> list[Path]:
    """Folders below a run's ``private/`` that hold parties' folders: of the server, of the clients, and of the sites
    of a rehearsal on this machine.
    """
    return [private, private / "memory", *sorted(private.glob("deployment/sites/*/*/memory"))]


def parties(private: Path) -> list[str]:
    """Folders of lists below ``private/``, relative to it: what must be there when the run goes on."""
    found = []
    for root in roots(private):
        lists = root / LISTS
        if lists.is_dir():
            place = lists.relative_to(private)
            found += [f"{place}/{name}" for name in os.listdir(lists)]
    return sorted(found)


def losses(private: Path, until: int, wanted: Iterable[str]) -> Iterator[Loss]:
    """What is damaged or missing below a run's ``private/``.

    Args:
        until: the round after which the run goes on: what later ones have left is written again.
        wanted: what :func:`parties` said then.
    """
    for name in wanted:
        if not (private / name / "list").is_file():
            place = private / name
            yield Loss(place / "list", MISSING, place.parent.parent, place.name)
    for root in roots(private):
        for party in _folders(root):
            yield from _losses_of(root, party, until)


def secrets(private: Path) -> Iterator[Path]:
    """The secrets of all parties below a run's ``private/``."""
    for root in roots(private):
        for party in _folders(root):
            yield from sorted((root / party).glob("*.secret"))


def unlisted(private: Path) -> bool:
    """Whether somebody has files here and no list of them."""
    return any(
        files(root / party) and not (root / LISTS / party / "list").exists()
        for root in roots(private)
        for party in _folders(root)
    )


def _folders(root: Path) -> list[str]:
    places = [root / LISTS, *([root] if root.name == "memory" else [])]
    found = {path.name for place in places if place.is_dir() for path in place.iterdir() if path.is_dir()}
    return sorted((found - {LISTS}) | ({"server"} if root.name != "memory" else set()))


def _losses_of(root: Path, party: str, until: int) -> Iterator[Loss]:
    folder, list_file = root / party, root / LISTS / party / "list"
    try:
        names = listed(list_file) or set()
    except Lost:
        names = set()
        yield Loss(list_file, DAMAGED, root, party)
    for name in sorted(names | files(folder)):
        version = version_of(name)
        if version is not None and version[0] > until:
            continue
        path = folder / name
        if not path.exists():
            yield Loss(path, MISSING, root, party)
        elif not whole(path):
            yield Loss(path, DAMAGED, root, party)
