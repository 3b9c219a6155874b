"""HTML and tables, from the files of a run directory alone."""

from __future__ import annotations

import sys
import types
from pathlib import Path


class _Callable(types.ModuleType):
    """``fedfm.report`` is this package, and ``fedfm.report(run)`` writes a page: a function could not have its name."""

    def __call__(self, run: str | Path) -> Path:
        """Write a run's ``report.html``; returns its path.

        Raises:
            InputError: there is no run.
        """
        from fedfm.report import html

        return html.write(Path(run))


sys.modules[__name__].__class__ = _Callable
