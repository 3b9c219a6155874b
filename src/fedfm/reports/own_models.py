"""Find which clients have their own models at the end of a run, including clients that joined after training."""

from __future__ import annotations

from fedfm.config.experiment import Experiment
from fedfm.core.text import safe_name
from fedfm.errors import FedfmError
from fedfm.reports.read import RunFiles, mapping
from fedfm.runtime.predictions import personal


def own_models(run: RunFiles) -> bool | None:
    """Whether every client ends with its own model; None if neither the experiment nor the files tell it.

    A method from outside fedfm is not imported, since the run may come from somebody else: its files tell it.
    """
    try:
        return personal(Experiment.from_dict(dict(run.experiment)).method)
    except (FedfmError, ImportError):
        joined = {safe_name(name) for name in newcomers_of(run)}
        if any(folder.parent.name not in joined for folder in run.path.glob("clients/*/adapter")):
            return True
        return False if (run.path / "adapter").is_dir() else None


def newcomers_of(run: RunFiles) -> list[str]:
    """Names of the clients that received a model after training, by ``fedfm join``."""
    return list(map(str, mapping(run.manifest.get("newcomers"))))
