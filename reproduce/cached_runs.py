"""Runs that are made once and kept as long as their experiment is the same."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.api import execute
from fedfm.config.experiment import Experiment
from fedfm.errors import InputError
from fedfm.runtime.run_directory import Run


def run_once(path: Path, out: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one run, made once and kept as long as the experiment is the same."""
    experiment = Experiment.load(path, dict(changes))
    if (out / "manifest.json").exists():
        if earlier_experiment(out) == experiment.to_dict():
            return execute.resume(out)
        shutil.rmtree(out)  # it is of an older row of this name
    print(f"{out.parent.name}/{out.name}", file=sys.stderr, flush=True)
    return execute.run(experiment, out)


def earlier_experiment(out: Path) -> dict[str, Any] | None:
    """What was run there, with the defaults of keys that came later; None where it is not an experiment any more."""
    try:
        return Run.open(out).experiment.to_dict()
    except InputError:
        return None
