"""The commands that run experiments. Each imports the heavy libraries that it needs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedfm.api.terminal import say, tell
from fedfm.core.text import visible
from fedfm.errors import InputError

if TYPE_CHECKING:
    from fedfm.config.experiment import Experiment
    from fedfm.runtime.progress_bar import Bar

T = TypeVar("T")


def experiment_of(args: Namespace) -> Experiment:
    """The experiment of a command's file, with its --set and --engine."""
    from fedfm.config.experiment import Experiment
    from fedfm.config.toml import parse_override

    overrides = dict(parse_override(text) for text in args.set)
    if args.engine:
        overrides["run.engine"] = args.engine
    return Experiment.load(args.experiment, overrides, tell=lambda text: tell(f"fedfm: {text}", sys.stderr))


def run(args: Namespace) -> int:
    """``fedfm run``."""
    experiment = experiment_of(args)
    progress = watch()
    if args.tune or args.seeds or args.baselines:
        return _run_study(args, experiment, progress)
    return _run_once(args, experiment, progress)


def _run_once(args: Namespace, experiment: Experiment, progress: Bar) -> int:
    from fedfm.api import execute

    result = _hint_on_stop(lambda: execute.run(experiment, args.out, progress=progress), progress)
    return say(args, result, lambda: _summary(result))


def _run_study(args: Namespace, experiment: Experiment, progress: Bar) -> int:
    """Several runs in place of one, or before it."""
    from fedfm.api import studies

    if args.tune:
        rates = _numbers("--tune", args.tune, float)
        experiment = _study(args, lambda: studies.tune(experiment, rates, args.out, progress), progress)
    if args.seeds and args.baselines:
        raise InputError("--seeds and --baselines exclude each other")
    if args.baselines:
        result = _study(args, lambda: studies.with_baselines(experiment, args.out, progress), progress)
        return say(args, result, studies.baselines_text(result))
    if args.seeds:
        seeds = _numbers("--seeds", args.seeds, int)
        if min(seeds) < 0:
            raise InputError(f"--seeds {args.seeds}: seeds are whole numbers of at least 0")
        result = _study(args, lambda: studies.seeds(experiment, seeds, args.out, progress), progress)
        return say(args, result, studies.seeds_text(result))
    return _run_once(args, experiment, progress)


def _numbers(flag: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers of at least 0" if kind is int else "numbers"
        raise InputError(f"{flag} {text}: expected {what} separated by commas") from None


def resume(args: Namespace) -> int:
    """``fedfm resume``."""
    from fedfm.api import execute
    from fedfm.config.toml import parse_override

    progress = watch()
    changes = dict(parse_override(text) for text in args.set)
    how = {"accept_loss": args.accept_loss, "rounds": args.rounds, "changes": changes}
    result = _hint_on_stop(lambda: execute.resume(args.run, progress=progress, **how), progress)
    tell_missing(Path(result["run"]))
    return say(args, result, lambda: _summary(result))


def _hint_on_stop(call: Callable[[], dict[str, Any]], progress: Bar) -> dict[str, Any]:
    """Run the experiment; if it stops, print how to continue."""
    try:
        return call()
    except InputError:
        raise
    except (KeyboardInterrupt, Exception):
        if progress.path is not None:
            tell(f"fedfm: committed rounds are kept; continue with: fedfm resume {progress.path}", sys.stderr)
        raise


def _study(args: Namespace, call: Callable[[], T], progress: Bar) -> T:
    """Run several experiments; if they stop, print how to continue."""
    try:
        return call()
    except InputError:
        raise
    except (KeyboardInterrupt, Exception):
        if progress.path is not None and progress.path.exists() and not (getattr(args, "tune", None) and not args.out):
            place = args.out or progress.path.parent
            tell(f"fedfm: committed rounds are kept; continue with: the same command and --out {place}", sys.stderr)
        raise


def watch() -> Bar:
    """A bar on stderr for a run."""
    from fedfm.runtime.progress_bar import Bar

    return Bar()


def _summary(result: dict[str, Any]) -> str:
    from fedfm.reports import compare

    return f"{compare.table([Path(result['run'])]).rstrip()}\nreport: {Path(result['run']) / 'report.html'}"


def tell_missing(path: Path) -> list[str]:
    """Print and return the run's records that are missing or lost."""
    from fedfm.reports.read import read

    missing = list(read(path).missing)
    for text in missing:
        tell(f"fedfm: {visible(f'{path}: {text}')}", sys.stderr)
    return missing


def demo(args: Namespace) -> int:
    """``fedfm demo``."""
    from fedfm.api import studies

    progress = watch()
    result = _study(args, lambda: studies.demo(args.out, args.seed, progress), progress)
    return say(args, result, studies.demo_text(result))
