"""Find which clients have their own models at the end of a run, including clients that joined after training."""

from __future__ import annotations

from fedfm.config.experiment import Experiment
from fedfm.errors import FedfmError
from fedfm.reports.read import RunFiles, mapping
from fedfm.runtime.predictions import personal


def own_models(run: RunFiles) -> bool | None:
    """Whether every client ends with its own model; None if the manifest's experiment is unreadable."""
    try:
        return personal(Experiment.from_dict(dict(run.experiment), imports=True).method)
    except (FedfmError, ImportError):
        return None


def newcomers_of(run: RunFiles) -> list[str]:
    """Names of the clients that received a model after training, by ``fedfm join``."""
    return list(map(str, mapping(run.manifest.get("newcomers"))))
