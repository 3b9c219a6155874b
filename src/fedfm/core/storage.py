"""Any value that can travel, on disk: one safetensors file, written atomically, whole or not at all.

The file holds one uint8 tensor, the packed data of :mod:`fedfm.core.wire.payload`, and in its metadata the head and a
SHA-256 over both. A truncated or changed file is recognised and never half read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from fedfm.core.wire import payload
from fedfm.errors import ClientFault, RunError
from fedfm.linalg.out_of_core import limit, open_again, remember

LONGEST = 8 << 20  # of a log
_LONGEST = 255  # bytes of a file's name
_SEAL = b"fedfm-sealed-1\n"


def safe_name(client: str) -> str:
    """A file name for a client's name, which is untrusted: no separators, no dots alone, one name a client.

    Of one that is too long for a file system its beginning stays, and "+", which no other holds, with a hash.
    """
    name = quote(client, safe="", errors="surrogatepass")
    name = name if client.strip(".") else name.replace(".", "%2E")
    return name if len(name) <= _LONGEST else f"{name[:160]}+{hashlib.sha256(name.encode()).hexdigest()}"


def write_atomic(path: Path, data: bytes | Sequence[bytes | memoryview], mode: int = 0o666, sync: bool = True) -> None:
    """Replace ``path`` by ``data``: readers see the old file or the new one, whatever is killed when.

    Args:
        data: as one piece or as several, one after the other.
        mode: the user's umask takes from it, as from every new file's.
        sync: also survive a power cut, not only a killed process.

    Raises:
        RunError: the disk is full or not writable; the old file is untouched.
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
        raise not_written(path, error) from error


def append(path: Path, text: str) -> None:
    """Add to a log that only its owner reads and that does not grow past :data:`LONGEST` bytes.

    Others cause its lines, as fast as they send messages.
    """
    with open(path, "a", encoding="utf-8", errors="backslashreplace", opener=private) as file:
        size = os.fstat(file.fileno()).st_size
        if size < LONGEST:
            file.write(text[: LONGEST - size])
            if size + len(text) >= LONGEST:
                file.write("\n--- this log is full: move it away\n")


def discard(folder: Path, names: Iterable[str]) -> None:
    """What was refused leaves nothing behind: these files and folders go, and the folder if nothing else is in it."""
    import shutil

    for name in names:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: somebody else's files
        folder.rmdir()


def sweep(folder: Path, name: str) -> None:
    """Remove what killed processes have left half-written of this file; nobody else may be writing it."""
    for path in folder.glob(f".{name}.*"):
        path.unlink(missing_ok=True)


def free(folder: Path, first: str, folders: Iterable[str] = ()) -> bool:
    """Whether a folder is absent or empty, or holds only what a process left that was killed as it began.

    Args:
        first: the file that is written first of all.
        folders: those that are made before.
    """
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    return all(
        path.name.startswith(f".{first}.") or (path.name in folders and path.is_dir() and not any(path.iterdir()))
        for path in folder.iterdir()
    )


def private(path: str, flags: int) -> int:
    """An opener: the file is its owner's alone."""
    return os.open(path, flags, 0o600)


def full(error: Exception) -> bool:
    """Whether this, of the system or of a library that hides its number, says that a disk has no space left."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return getattr(error, "errno", None) in codes or any(f"(os error {code})" in str(error) for code in codes)


def not_written(path: Path, error: Exception) -> RunError:
    """What to say when a file of a run could not be written."""
    what = "the disk is full" if full(error) else getattr(error, "strerror", None) or str(error)
    return RunError(f"cannot write {path}: {what}; what was committed before is kept")


def save(path: Path, value: Any, mode: int = 0o666, sync: bool = True) -> None:
    """Write ``value`` (Params, tensors, numbers, text, lists, dicts, dataclasses of them), from where it lies."""
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
    """A small file's content with its SHA-256 before it; :func:`unseal` has it back."""
    return _SEAL + hashlib.sha256(data).digest() + data


def unseal(sealed: bytes) -> bytes | None:
    """What was sealed; None where it was cut or altered.

    Example:
        >>> unseal(seal(b"key")), unseal(seal(b"key")[:-1])
        (b'key', None)
    """
    digest, data = sealed[len(_SEAL) : len(_SEAL) + 32], sealed[len(_SEAL) + 32 :]
    return data if sealed.startswith(_SEAL) and hashlib.sha256(data).digest() == digest else None


def load(path: Path, hint: Any = Any) -> Any | None:
    """The value, checked against ``hint`` (Any: all numbers are finite; None: not at all); None if the file is absent,
    truncated or altered.

    Of more bytes than :func:`fedfm.linalg.out_of_core.limit` vectors and tensors stay in the file, mapped: the system
    reads them when they are used. Writing to them changes nothing on the disk.
    """
    try:
        if (found := _checked(path)) is None:
            return None
        head, data = found
        return payload.decode(head, data if data.nbytes > limit() else memoryview(data), hint, trusted=True)
    except ClientFault:
        return None


def whole(path: Path) -> bool:
    """Whether the file is there as :func:`save` wrote it; its content is not decoded."""
    return _checked(path) is not None


def _checked(path: Path) -> tuple[str, Any] | None:
    """Head and data (n,) uint8 of a file, mapped, if their digest is the one that it names."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:  # its header is whole, and fits the file's length
            metadata = file.metadata() or {}
        data, head = _data(path), metadata["head"]
    except (OSError, KeyError, SafetensorError):
        return None
    digest = hashlib.sha256(head.encode())
    digest.update(data)
    return (head, data) if digest.hexdigest() == metadata.get("sha256") else None


def _data(path: Path) -> Any:
    """The one tensor of a safetensors file (n,) uint8, mapped."""
    with open(path, "rb") as file:
        # Private: what is written to a tensor stays out of the file. Not reserved: nobody means to write.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    data = np.frombuffer(mapped, np.uint8)
    remember(data, open_again(path, os.O_RDONLY))
    return data[8 + int.from_bytes(mapped[:8], "little") :]
