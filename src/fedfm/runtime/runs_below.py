"""Find runs in folders that ``fedfm run --seeds``, ``--baselines`` and ``fedfm demo`` make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fedfm.core import storage
from fedfm.core.text import from_json, to_json
from fedfm.errors import InputError

STUDY = "study.json"  # lists the folders of a run and its baselines, the run's first; the file is next to them
_SHOWN = 8  # largest number of runs that a message names


def write_order(folder: Path, names: Sequence[str]) -> None:
    """Write the list of the folders of a run and of its baselines, in order."""
    (folder / STUDY).write_text(to_json({"runs": list(names)}) + "\n", encoding="utf-8")


def order_in(folder: Path) -> list[Path]:
    """Read the folders of a run and its baselines, in the order of :func:`write_order`; [] without a valid list."""
    try:
        storage.refuse_pipe(folder / STUDY)
        names = from_json((folder / STUDY).read_text(encoding="utf-8"))["runs"]
        found = [folder / Path(name).name for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [path for path in found if (path / "manifest.json").exists()]


def each_run(paths: Iterable[Path]) -> list[Path]:
    """Return run directories: a folder of runs is replaced by all runs in it, each run before its baselines."""
    found: list[Path] = []
    for path in paths:
        inner = runs_in(path)
        first = [run for run in order_in(path) if run in inner]
        found += [*first, *(run for run in inner if run not in first)] or [path]
    return found


def runs_in(path: Path) -> list[Path]:
    """Return the runs directly below a folder; empty if the folder is a run itself."""
    if not path.is_dir() or (path / "manifest.json").exists():
        return []
    return sorted(found.parent for found in path.glob("*/manifest.json"))


def no_run(path: Path) -> InputError:
    """Make the error for a path that is not a run directory; it names the runs below the path, if there are any."""
    if not path.exists():
        return InputError(f"{path}: there is no such folder")
    if not path.is_dir():
        return InputError(f"{path}: this is a file; expected the directory of a run")
    if not runs_in(path):
        return InputError(f"{path}: this is not a run; manifest.json is missing")
    runs = each_run([path])
    more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    return InputError(f"{path}: this is a folder of runs; take one of {', '.join(map(str, runs[:_SHOWN]))}{more}")
