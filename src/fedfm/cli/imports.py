"""Import large libraries quickly."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Context manager for imports of PyTorch: no garbage is collected, and the new objects are left out of collections.

    Modules live as long as the process. While PyTorch makes some 100,000 objects, Python would go through all of them
    several times in search of garbage, and once more at exit: this takes a quarter of the import's time. If PyTorch is
    loaded already, this changes nothing.
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
