"""Files: one safetensors file per value in the wire format, atomic writes, logs of bounded length.

A safetensors file has one uint8 tensor, the packed data of :mod:`fedfm.core.wire.payload`. Its metadata have the head
and a SHA-256 over both, so that a truncated or changed file is detected before decoding.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.core.wire import payload
from fedfm.errors import ClientFault, InputError, NotWritten
from fedfm.linalg import pages
from fedfm.linalg.out_of_core import limit

LONGEST = 8 << 20  # largest size of a log in bytes
_ROOM = 1 << 20  # bytes; after a failed write a disk with less free space counts as full
_BEGIN = 4096  # first bytes of a file, which identify its kind
_SEAL = b"fedfm-sealed-1\n"


def write_atomic(
    path: Path, data: bytes | Sequence[bytes | memoryview], mode: int = 0o666, sync: bool = True, *, of_run: bool = True
) -> None:
    """Replace ``path`` by ``data``: readers see either the old or the new file, even if this process is killed.

    Args:
        data: one piece, or several to concatenate.
        mode: permissions before the user's umask.
        sync: whether the write survives a power cut, too, not only a killed process.
        of_run: as in :func:`not_written`.

    Raises:
        NotWritten: the disk is full or not writable; the old file is untouched.
    """
    temporary = path.parent / f".{path.name}.{os.urandom(4).hex()}"
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise not_written(path, error, of_run=of_run) from error


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk, so that a new file in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, text: str) -> None:
    """Append to a log that only its owner can read.

    The log has at most :data:`LONGEST` bytes, because other parties can cause lines in it.

    Raises:
        NotWritten: the disk is full or not writable.
    """
    try:
        with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=private) as file:
            size = os.fstat(file.fileno()).st_size
            if size < LONGEST:
                file.write(text[: LONGEST - size])
                if size + len(text) >= LONGEST:
                    file.write("\n--- this log is full: move it away\n")
    except OSError as error:
        raise not_written(path, error) from error


def discard(folder: Path, names: Iterable[str], last: Path | None = None) -> None:
    """Remove these files and folders, and then the folder if it is empty.

    Args:
        last: the file that locks the folder, removed last: afterwards another process may use the folder.
    """
    for path in (folder / name for name in names):
        for one in list(path.iterdir()) if last is not None and path == last.parent else (path,):
            if one != last:
                remove(one)
    with contextlib.suppress(OSError):  # a folder contains other files
        if last is not None:
            last.unlink(missing_ok=True)
            last.parent.rmdir()
        folder.rmdir()


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content; it may be absent."""
    import shutil

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sweep(folder: Path, name: str) -> None:
    """Remove the temporary files of file ``name`` that killed processes left; no process may be writing the file."""
    for path in folder.glob(f".{name}.*"):
        path.unlink(missing_ok=True)


def free(folder: Path, first: str, folders: Iterable[str] = (), empty: str = "") -> bool:
    """Whether a folder is absent or empty, or has only the first files of a process that was killed at its start.

    Args:
        first: the first file that such a process writes.
        folders: the folders that it makes before that file.
        empty: the name of an empty file that it may make in these folders.
    """
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    return all(
        path.name.startswith(f".{first}.")
        or (path.name in folders and path.is_dir() and all(_is_empty(inner, empty) for inner in path.iterdir()))
        for path in folder.iterdir()
    )


def _is_empty(path: Path, name: str) -> bool:
    return path.name == name and path.is_file() and not path.stat().st_size


def private(path: str, flags: int) -> int:
    """Opener of a file that only its owner can read."""
    return os.open(path, flags, 0o600)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNWRITTEN = (*_FULL, errno.EROFS)  # errors that never occur in reading
_OS_ERROR = re.compile(r"\(os error (\d{1,9})\)")


def _number(error: Exception) -> int | None:
    """The system's error number, even if a library has it only in the text."""
    if isinstance(error, OSError):
        return error.errno
    found = _OS_ERROR.search(str(error))
    return int(found[1]) if found else None


def full(error: Exception) -> bool:
    """Whether an error of the system, or of a library that hides its number, means that the disk is full."""
    return _number(error) in _FULL


def why(error: Exception) -> str:
    """Why a file could not be written, in words."""
    if full(error):
        return "the disk is full"
    number = _number(error)
    return str(error) if number is None else os.strerror(number)


def not_written(path: Path, error: Exception, *, of_run: bool = True) -> NotWritten:
    """The error for a file that could not be written; for a run it says that committed rounds are kept."""
    kept = "; what was committed before is kept" if of_run else ""
    free = "; free some space there" if full(error) else ""
    return NotWritten(f"cannot write {path}: {why(error)}{kept}{free}")


def refuse_pipes(folder: Path) -> None:
    """Refuse pipes and devices in a folder from another party, since reading one may never end.

    Raises:
        InputError: there is a pipe or a device, or a link to one; the message names it.
    """
    waiting = [folder]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as found:  # later reads report errors
            for entry in found:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    refuse_pipe(Path(entry.path))


def refuse_pipe(path: Path) -> None:
    """Refuse one pipe or device, as :func:`refuse_pipes` does."""
    if is_endless(path):
        raise InputError(f"{path} is a pipe or a device, not a file; remove it")


def is_endless(path: Path) -> bool:
    """Whether the path, or its target if it is a link, is a pipe or a device."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False  # a link to nothing, or to itself
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def refuse_others(path: Path, mark: str) -> None:
    """Refuse to overwrite a file of another kind: it may be a user's work, or a key.

    Args:
        mark: a text in the first bytes of every file of this kind.

    Raises:
        InputError: the file exists without the mark.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(_BEGIN)
    except OSError:
        return  # it does not exist, or a later write reports the error
    if begin and mark.encode() not in begin:
        raise InputError(f"--out {path} exists and is of another kind; give another path")


@contextlib.contextmanager
def writing(path: Path, *, of_run: bool = False) -> Iterator[None]:
    """Context manager for library code that writes ``path`` or files in it: errors name the path.

    Args:
        of_run: as in :func:`not_written`.

    Raises:
        NotWritten: the disk is full or not writable.
    """
    try:
        yield
    except Exception as error:
        if _number(error) is None:
            raise
        raise not_written(Path(getattr(error, "filename", None) or path), error, of_run=of_run) from error


def place_of(error: Exception, places: Iterable[Path]) -> Path | None:
    """The file or folder that could not be written; None if the error is not about writing.

    Args:
        places: candidates, if the error does not name the file; the one on a full or read-only disk is chosen.
    """
    name, lacking = getattr(error, "filename", None), [place for place in places if _has_no_room(place)]
    if _number(error) in _UNWRITTEN and name:
        return Path(os.fsdecode(name))
    if lacking and (_number(error) in _UNWRITTEN or name is None):
        return lacking[0]
    return Path("a file") if full(error) else None


def is_write_failure(error: BaseException) -> bool:
    """Whether an error says that the disk is full or read-only."""
    return isinstance(error, NotWritten) or (isinstance(error, OSError) and _number(error) in _UNWRITTEN)


def _has_no_room(place: Path) -> bool:
    there = next((p for p in (place, *place.absolute().parents) if p.exists()), place)
    try:
        disk = os.statvfs(there)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _ROOM or bool(disk.f_flag & os.ST_RDONLY)


def save(path: Path, value: Any, mode: int = 0o666, sync: bool = True) -> None:
    """Write ``value`` (Params, tensors, numbers, text, lists, dicts, dataclasses of them) without copying it."""
    head, pieces = payload.encode(value)
    digest, size = hashlib.sha256(head.encode()), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    metadata = {"format": "fedfm-1", "head": head, "sha256": digest.hexdigest()}
    tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": metadata, "data": tensor}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    write_atomic(path, [len(header).to_bytes(8, "little"), header, *pieces], mode, sync)


def seal(data: bytes) -> bytes:
    """The content of a small file, preceded by its SHA-256; :func:`unseal` is the inverse."""
    return _SEAL + hashlib.sha256(data).digest() + data


def unseal(sealed: bytes) -> bytes | None:
    """The sealed content; None if it is truncated or altered.

    Example:
        >>> unseal(seal(b"key")), unseal(seal(b"key")[:-1])
        (b'key', None)
    """
    digest, data = sealed[len(_SEAL) : len(_SEAL) + 32], sealed[len(_SEAL) + 32 :]
    return data if sealed.startswith(_SEAL) and hashlib.sha256(data).digest() == digest else None


def load(path: Path, hint: Any = Any, *, mapped: bool = False) -> Any | None:
    """The value in a file; None if the file is absent, truncated or altered.

    The value is checked against ``hint``: if it is Any, all values must be finite; if it is None, nothing is checked.
    Tensors are memory-mapped if the file exceeds :func:`fedfm.linalg.out_of_core.limit`. With ``mapped`` they always
    are, and a pass over a large tensor frees its memory afterwards (:mod:`fedfm.linalg.pages`). Writing to a tensor
    does not change the file.
    """
    try:
        if (found := _read_checked(path)) is None:
            return None
        head, data = found
        if not mapped and data.nbytes <= limit():
            return payload.decode(head, memoryview(data), hint, trusted=True)
        if mapped:
            pages.register(data.base)
        return payload.decode(head, data, hint, trusted=True)
    except ClientFault:
        return None


def whole(path: Path) -> bool:
    """Whether the file is unchanged since :func:`save`; its content is not decoded."""
    return _read_checked(path) is not None


def _read_checked(path: Path) -> tuple[str, Any] | None:
    """Head and data (n,) uint8 of a file, memory-mapped; None unless their digest matches."""
    from safetensors import SafetensorError, safe_open

    from fedfm.linalg.mapped_files import open_again, remember

    # A private mapping keeps writes out of the file; it needs no swap space, since writes are not intended.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        with safe_open(path, framework="numpy") as file:  # checks the header, and the file's length against it
            metadata = file.metadata() or {}
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        block, head = np.frombuffer(mapped, np.uint8), metadata["head"]
        remember(block, open_again(path, os.O_RDONLY))
    except (OSError, KeyError, SafetensorError):
        return None
    data: Any = block[8 + int.from_bytes(mapped[:8], "little") :]
    digest = hashlib.sha256(head.encode())
    digest.update(data)
    return (head, data) if digest.hexdigest() == metadata.get("sha256") else None
