"""fedfm: adapt foundation models across organisations that cannot pool their data.

>>> import fedfm
>>> result = fedfm.run("exp.toml")              # doctest: +SKIP
>>> fedfm.load_run(result["run"]).metrics()     # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedfm.version import __version__

__all__ = [
    "Client",
    "ClientId",
    "Experiment",
    "Federation",
    "Method",
    "Needs",
    "Params",
    "Progress",
    "Run",
    "Traits",
    "Update",
    "__version__",
    "advise",
    "audit",
    "compare",
    "each",
    "export",
    "federate",
    "join",
    "leave",
    "load_run",
    "on_client",
    "predict",
    "report",
    "resume",
    "run",
    "setting",
    "survey",
    "worth",
]

if TYPE_CHECKING:
    from fedfm.api.advise import advise
    from fedfm.api.audit_and_compare import audit, compare, report
    from fedfm.api.execute import load_run, resume, run
    from fedfm.api.federate import federate
    from fedfm.api.join import join
    from fedfm.api.leave import leave
    from fedfm.api.predict import export, predict
    from fedfm.api.survey import survey
    from fedfm.api.worth import worth
    from fedfm.config.experiment import Experiment
    from fedfm.core.capabilities import Needs, Traits
    from fedfm.core.client import Client, ClientId, Update, each, on_client
    from fedfm.core.federation import Federation
    from fedfm.core.fields import setting
    from fedfm.core.method import Method
    from fedfm.linalg.params import Params
    from fedfm.runtime.progress import Progress
    from fedfm.runtime.run_directory import Run

_MODULES = {
    "api.execute": ("load_run", "resume", "run"),
    "api.audit_and_compare": ("audit", "compare", "report"),
    **{f"api.{name}": (name,) for name in ("advise", "federate", "join", "leave", "survey", "worth")},
    "api.predict": ("export", "predict"),
    "config.experiment": ("Experiment",),
    "core.capabilities": ("Needs", "Traits"),
    "core.client": ("Client", "ClientId", "Update", "each", "on_client"),
    "core.federation": ("Federation",),
    "core.fields": ("setting",),
    "core.method": ("Method",),
    "linalg.params": ("Params",),
    "runtime.progress": ("Progress",),
    "runtime.run_directory": ("Run",),
}


if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name):
        """Import a name on first use, so that `import fedfm` itself costs nothing."""
        for module, names in _MODULES.items():
            if name in names:
                from importlib import import_module

                return getattr(import_module(f"fedfm.{module}"), name)
        raise AttributeError(f"module 'fedfm' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
