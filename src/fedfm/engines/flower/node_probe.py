"""What a node of a Ray cluster has. Ray sends this module's functions to nodes that may lack fedfm, so it imports only
the standard library.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("fedfm", "flwr", "torch", "transformers", "peft", "numpy")
_ENDS = 1 << 22  # bytes at the beginning and at the end of a file that are compared
_FILES = 20_000  # files of a folder that are compared by name and size
_SETS = ("avx", "avx2", "avx512f", "avx512_bf16", "amx_bf16")  # instruction sets that change how torch rounds


def look(paths: Sequence[str], token: tuple[str, str] | None = None) -> dict[str, Any]:
    """Versions, the processor, and what this machine finds at paths.

    Args:
        token: path and text of a file in the run's folder.

    Returns:
        ``versions`` by package (None if it is missing), ``processor``, ``marks`` by path (None if it cannot be read),
        and ``shares``: whether the run's folder is here, and can be written.
    """
    shares = True
    if token is not None:
        path, text = token
        try:
            shares = Path(path).read_text() == text and os.access(Path(path).parent, os.W_OK)
        except OSError:
            shares = False
    versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
    return {
        "versions": versions,
        "processor": _processor(),
        "marks": {path: mark(path) for path in paths},
        "shares": shares,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The machine's type and the instruction sets that torch chooses its products by."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return " ".join([platform.machine(), *(name for name in _SETS if name in flags)])


def mark(path: str) -> str | None:
    """A hash of a file's size, beginning and end, or of the names and sizes in a folder; None if it cannot be read."""
    digest = hashlib.sha256()
    try:
        if os.path.isdir(path):
            for name, size in _files_in(path):
                digest.update(f"{name}\x1f{size}\n".encode())
        else:
            size = os.path.getsize(path)
            with open(path, "rb") as file:
                digest.update(f"{size}\n".encode() + file.read(_ENDS))
                file.seek(max(size - _ENDS, 0))
                digest.update(file.read(_ENDS))
    except OSError:
        return None
    return digest.hexdigest()


def _files_in(folder: str) -> list[tuple[str, int]]:
    os.listdir(folder)  # raises an error that os.walk would hide
    found = []
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(root, name)
            found.append((os.path.relpath(path, folder), os.path.getsize(path)))
            if len(found) == _FILES:
                return found
    return found
