"""Check the files of a finished run: its last checkpoint and its models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedfm.errors import InputError, Lost
from fedfm.models.adapter_files import ABOUT
from fedfm.models.adapter_reading import file_faults
from fedfm.runtime.result_match import final_state, other_model
from fedfm.runtime.run_directory import Run

_NAMED = 3  # largest number of files that an error names


def refuse_lost(run: Run) -> None:
    """Refuse a finished run that has lost its model.

    A copy without ``private/``, which was made to share the run, need not have all files.

    Raises:
        Lost: the checkpoint or a model is missing or damaged; the error names the files.
    """
    if not (run.path / "private").is_dir() or not (found := list(_faults(run))):
        return
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    raise Lost(
        f"{run.path} has finished, but {', '.join(found[:_NAMED])}{more}: put back a copy, or run the experiment "
        f"again. `fedfm resume {run.path} --accept-loss` prints the result alone"
    )


def _faults(run: Run) -> Iterator[str]:
    try:
        final_state(run, run.experiment.method.state_type, mapped=True)
    except InputError as error:
        yield str(error).partition(": put ")[0]
    newcomers = {run.adapter(client) for client in run.manifest.get("newcomers", {})}
    folders = {run.adapter(), *run.path.glob("clients/*/adapter")}
    there = {folder for folder in folders if folder.is_dir()}
    missing = run.manifest.get("models", 0) - len(there - newcomers)
    if missing > 0:
        yield _missing_folders(run, there, missing)
    yield from (f"{folder} is missing" for folder in newcomers if not folder.is_dir())
    for folder in sorted({*there, *run.path.glob("last/**/adapter")}):
        yield from (fault for about in sorted(folder.rglob(ABOUT)) for fault in file_faults(about.parent))
        yield from other_model(run, folder)
        if not any(folder.rglob(ABOUT)):
            yield f"{folder / ABOUT} is missing"


def _missing_folders(run: Run, there: set[Path], missing: int) -> str:
    """Name the missing folders of models, as far as it is known which clients had a model."""
    if not (run.path / "clients").is_dir():
        return f"{run.adapter()} is missing"
    names = [client for client in run.manifest["clients"] if run.adapter(client) not in there]
    if len(names) > missing:
        return f"{missing} models of clients are missing in {run.path / 'clients'}"
    return f"the models of {', '.join(names[:_NAMED])}{' and others' if len(names) > _NAMED else ''} are missing"
