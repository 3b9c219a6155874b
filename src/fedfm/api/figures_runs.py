"""Runs whose result is figures and no model."""

from __future__ import annotations

from fedfm.errors import InputError
from fedfm.runtime.run_directory import Run


def need_model(run: Run) -> None:
    """Refuse a run that has figures and no model.

    Raises:
        InputError: the run is such a run.
    """
    if run.experiment.method.traits.figures_only:
        raise InputError(
            f"{run.path}: {run.experiment.method_name} trained nothing: the run has figures and no model; see its "
            "report.html"
        )
