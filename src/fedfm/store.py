"""Any value that can travel, on disk: one safetensors file, written atomically, whole or not at all.

The file holds one uint8 tensor, the packed data of :mod:`fedfm.wire`, and in its metadata the head and a SHA-256 over
both. A truncated or changed file is recognised and never half read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from fedfm import wire
from fedfm.errors import ClientFault, RunError


def safe_name(client: str) -> str:
    """A file name for a client's name, which is untrusted: no separators, no dots alone, one name a client."""
    return quote(client, safe="") if client.strip(".") else quote(client, safe="").replace(".", "%2E")


def write_atomic(path: Path, data: bytes, mode: int = 0o644, sync: bool = True) -> None:
    """Replace ``path`` by ``data``: readers see the old file or the new one, whatever is killed when.

    Args:
        sync: also survive a power cut, not only a killed process.

    Raises:
        RunError: the disk is full or not writable; the old file is untouched.
    """
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise not_written(path, error) from error


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


def private(path: str, flags: int) -> int:
    """An opener: the file is its owner's alone."""
    return os.open(path, flags, 0o600)


def not_written(path: Path, error: OSError) -> RunError:
    """What to say when a file of a run could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    what = "the disk is full" if full else error.strerror
    return RunError(f"cannot write {path}: {what}; what was committed before is kept")


def save(path: Path, value: Any, mode: int = 0o644, sync: bool = True) -> None:
    """Write ``value`` (Params, tensors, numbers, text, lists, dicts, dataclasses of them)."""
    from safetensors.torch import save as to_safetensors

    head, pieces = wire.encode(value)
    data = b"".join(pieces)
    digest = hashlib.sha256(head.encode() + data).hexdigest()
    tensors = {
        "data": torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    }
    write_atomic(path, to_safetensors(tensors, {"format": "fedfm-1", "head": head, "sha256": digest}), mode, sync)


def load(path: Path, hint: Any = Any) -> Any | None:
    """The value, checked against ``hint``; None if the file is absent, truncated or altered."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            data = file.get_tensor("data").tobytes()
        head = metadata["head"]
        if hashlib.sha256(head.encode() + data).hexdigest() != metadata["sha256"]:
            return None
        return wire.decode(head, data, hint)
    except (OSError, KeyError, SafetensorError, ClientFault):
        return None
