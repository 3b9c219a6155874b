"""Functions with which commands run an experiment: read its file, show its progress, print its result."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.api.terminal import hint_on_stop, say, tell
from fedfm.cli.imports import quick_imports
from fedfm.core.text import visible

if TYPE_CHECKING:
    from fedfm.config.experiment import Experiment
    from fedfm.runtime.progress_bar import Bar


def experiment_of(args: Namespace) -> Experiment:
    """Read the experiment in a command's file, and change it by --set and --engine."""
    with quick_imports():
        from fedfm.config.experiment import Experiment

    overrides: dict[str, Any] = {}
    if args.set:
        from fedfm.core.overrides import parse_overrides, refuse_doubles

        overrides = parse_overrides(args.set)
        named = {"run.engine": "engine", "run.seed": "seeds", "method.local.learning_rate": "tune"}
        refuse_doubles(overrides, {key: (f"--{name}", getattr(args, name, None)) for key, name in named.items()})
    if args.engine:
        overrides["run.engine"] = args.engine
    return Experiment.load(args.experiment, overrides, tell=lambda text: tell(f"fedfm: {text}", sys.stderr))


def run_once(args: Namespace, experiment: Experiment, progress: Bar) -> int:
    """Run one experiment and print its result."""
    from fedfm.api import execute

    with hint_on_stop(lambda: hint_for_rounds(progress)):
        result = execute.run(experiment, args.out, progress=progress)
    return say(args, result, lambda: summary(result))


def hint_for_rounds(progress: Bar) -> str | None:
    """How to continue a run that has begun."""
    if progress.path is None:
        return None
    return f"committed rounds are kept; continue with: fedfm resume {progress.path}"


def watch() -> Bar:
    """Make a progress bar on stderr for a run."""
    from fedfm.runtime.progress_bar import Bar

    return Bar()


def summary(result: dict[str, Any]) -> str:
    """Return a run's table as text, and the path of its report."""
    from fedfm.reports import run_table

    return f"{run_table.table([Path(result['run'])]).rstrip()}\nreport: {Path(result['run']) / 'report.html'}"


def tell_missing(path: Path) -> list[str]:
    """Print, and return, sentences about records of a run that are missing or lost."""
    from fedfm.reports.read import read

    missing = list(read(path).missing)
    for text in missing:
        tell(f"fedfm: {visible(f'{path}: {text}')}", sys.stderr)
    return missing
