"""Whoever waits is told that loops are being compiled: the first run on a machine takes seconds longer for it."""

from __future__ import annotations

import mmap
from collections.abc import Callable

TEXT = "compiling loops for this machine, once; later runs find them on disk"
_said = mmap.mmap(-1, 1)  # shared with forked workers: whoever compiles first speaks, and the others do not
_tell: Callable[[str], None] | None = None


def tell(how: Callable[[str], None] | None) -> None:
    """Say it through ``how``, once for this process and those that it forks later; None: nobody is to be told."""
    global _tell
    _tell = how
    _said[0] = 0


def begins() -> None:
    """A loop is about to be compiled."""
    if _tell is not None and not _said[0]:
        _said[0] = 1
        _tell(TEXT)
