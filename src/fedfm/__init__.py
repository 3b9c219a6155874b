"""fedfm: adapt foundation models across organisations that cannot pool their data.

>>> import fedfm
>>> result = fedfm.run("exp.toml")              # doctest: +SKIP
>>> fedfm.load_run(result["run"]).metrics()     # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Experiment", "Method", "Params", "Progress", "Run", "federate", "load_run", "resume", "run"]

if TYPE_CHECKING:
    from fedfm.api import load_run, resume, run
    from fedfm.experiment import Experiment
    from fedfm.inmemory import federate
    from fedfm.method import Method
    from fedfm.params import Params
    from fedfm.progress import Progress
    from fedfm.rundir import Run

_WHERE = {
    "Experiment": "fedfm.experiment",
    "Method": "fedfm.method",
    "Params": "fedfm.params",
    "Progress": "fedfm.progress",
    "Run": "fedfm.rundir",
    "federate": "fedfm.inmemory",
    "load_run": "fedfm.api",
    "resume": "fedfm.api",
    "run": "fedfm.api",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import fedfm` costs nothing."""
    if name not in _WHERE:
        raise AttributeError(f"module 'fedfm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_WHERE[name]), name)
