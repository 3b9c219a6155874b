"""Keys of the [model] table that a task computes from the training rows of all clients."""

from __future__ import annotations

from dataclasses import fields, replace

from fedfm.config.experiment import Experiment
from fedfm.core import tasks
from fedfm.core.fields import key_of
from fedfm.data.table import FederatedData
from fedfm.data.task_rows import row_task
from fedfm.models.model import Model
from fedfm.runtime.run_directory import Run


def add(experiment: Experiment, federated: FederatedData) -> tuple[Experiment, FederatedData]:
    """Add the keys to the experiment, and notices about them to the rows. A silo's experiment already has the keys."""
    named = tasks.task_named(experiment.model.task)
    if named is None:
        return experiment, federated
    keys, notices = row_task(named.of(experiment.model)).keys_of_rows(federated)
    found = replace(experiment, model=replace(experiment.model, **keys)) if keys else experiment
    return found, replace(federated, notices=(*federated.notices, *notices))


def keep(run: Run, model: Model) -> None:
    """Write the keys into the experiment of the manifest, so that later commands use the same values."""
    keys = {key: getattr(model.spec, key) for key in (key_of(f.name) for f in fields(model.task))}
    if changed := {key: value for key, value in keys.items() if value != getattr(run.experiment.model, key)}:
        run.manifest["experiment"]["model"] |= changed
        run.experiment = replace(run.experiment, model=replace(run.experiment.model, **changed))
