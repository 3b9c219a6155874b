"""Folders of runs, as ``fedfm run --seeds``, ``--baselines`` and ``fedfm demo`` make them."""

from __future__ import annotations

from pathlib import Path

from fedfm.errors import InputError

_SHOWN = 8  # runs by name


def runs_in(path: Path) -> list[Path]:
    """The runs directly below a folder; none if it is a run itself."""
    if not path.is_dir() or (path / "manifest.json").exists():
        return []
    return sorted(found.parent for found in path.glob("*/manifest.json"))


def no_run(path: Path) -> InputError:
    """The error for a path that is no run directory: it names the runs below it, if there are any."""
    if not path.exists():
        return InputError(f"{path}: no run here (no such folder)")
    if not path.is_dir():
        return InputError(f"{path}: no run here, but a file; expected the directory of a run")
    if not (runs := runs_in(path)):
        return InputError(f"{path}: no run here (manifest.json is missing)")
    more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    return InputError(
        f"{path}: no run here, but a folder of runs; take one of {', '.join(map(str, runs[:_SHOWN]))}{more}"
    )
