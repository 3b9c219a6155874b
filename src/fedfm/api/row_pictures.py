"""Draw some test rows of a run with their predictions, for its report."""

from __future__ import annotations

from pathlib import Path

from fedfm.api import predict
from fedfm.api.user_runs import is_own
from fedfm.core.output_files import RowPictures
from fedfm.data.load import load_table
from fedfm.data.partition import deal
from fedfm.errors import InputError
from fedfm.runtime import predictions
from fedfm.runtime.run_directory import Run


def draw(run_dir: Path, most: int) -> RowPictures:
    """Draw at most ``most`` of the run's global test rows from the data on this machine.

    Rows of silos are never drawn, since they are not on this machine.

    Raises:
        InputError: this machine has no test rows of the run, every client has its own model, or the task draws no rows.
    """
    if most < 1:
        raise InputError(f"--rows {most}: expected at least 1")
    run = Run.open(run_dir)
    experiment, where = run.experiment, f"--rows: {run_dir}"
    if is_own(run):
        raise InputError(f"{where} has a module of your own, whose rows are not drawn; drop it")
    if predictions.personal(experiment.method):
        raise InputError(f"{where} has a model for each client, and a report shows one: use fedfm predict --client")
    if experiment.data.classes is not None or run.manifest["split"] is None:
        raise InputError(f"{where}: the rows are at the silos, and stay there; drop it")
    run, model, w = predict.load(run_dir)
    table = load_table(experiment.data, seed=experiment.run.seed, task=model.task.name)
    test = deal(table, experiment.data, seed=experiment.run.seed).test
    if not len(test):
        raise InputError(f"{where} has no test rows")
    found: RowPictures | None = model.task.pictures(
        predict.TrainedRun(experiment.method, model, w), table.take(test[:most])
    )
    if found is None:
        raise InputError(f'{where}: rows of task "{model.task.name}" are not drawn; drop it')
    return found
