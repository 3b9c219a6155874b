"""The compiled loops of heads, and a process that compiles them ahead where that has never been done.

Compiling takes seconds, once on a machine; loading what was compiled takes less than one. Both wait until a head is to
be trained.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_MODULE = "fedfm.linalg.kernels.softmax_sgd"
_running: list[subprocess.Popen[bytes]] = []


def start() -> None:
    """Begin to compile in a process of its own, if nothing is on disk: there is a model to be loaded meanwhile."""
    spec = importlib.util.find_spec(_MODULE)
    if _running or spec is None or spec.origin is None or "NUMBA_CACHE_DIR" in os.environ:
        return
    source = Path(spec.origin)
    folder = source.parent / "__pycache__"  # where numba keeps it, if it may
    if not os.access(folder if folder.exists() else source.parent, os.W_OK):
        return
    changed = source.stat().st_mtime
    if any(kept.stat().st_mtime >= changed for kept in folder.glob(f"{source.stem}.*.nbi")):
        return
    _running.append(
        subprocess.Popen(
            [sys.executable, "-c", f"import {_MODULE}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    )


@functools.cache
def loops() -> Any:
    """The module of compiled loops, once what compiles it ahead has ended."""
    for process in _running:
        process.wait()
    return importlib.import_module(_MODULE)
