"""Import large libraries quickly."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Context manager for imports of PyTorch. It collects no garbage, and later collections skip the new objects.

    Modules live as long as the process. While PyTorch makes some 100,000 objects, Python would search all of them for
    garbage several times, and once more at exit. These searches take a quarter of the import's time. If PyTorch is
    loaded already, the context manager changes nothing.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
