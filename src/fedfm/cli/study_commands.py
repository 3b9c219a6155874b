"""The commands that run several experiments."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from fedfm.api.terminal import say, tell
from fedfm.cli.running import run_once, watch
from fedfm.errors import InputError

if TYPE_CHECKING:
    from fedfm.config.experiment import Experiment
    from fedfm.runtime.progress_bar import Bar

T = TypeVar("T")


def run_study(args: Namespace, experiment: Experiment, progress: Bar) -> int:
    """Run the several experiments that --seeds, --baselines or --tune ask for."""
    from fedfm.api import studies

    if args.tune is not None:
        rates = _numbers("--tune", args.tune, float)
        experiment = _study(args, lambda: studies.tune(experiment, rates, args.out, progress), progress)
    if args.seeds is not None and args.baselines:
        raise InputError("--seeds and --baselines exclude each other")
    if args.baselines:
        result = _study(args, lambda: studies.with_baselines(experiment, args.out, progress), progress)
        return say(args, result, studies.baselines_text(result))
    if args.seeds is not None:
        seeds = _numbers("--seeds", args.seeds, int)
        if min(seeds) < 0:
            raise InputError(f"--seeds {args.seeds}: expected whole numbers of at least 0")
        result = _study(args, lambda: studies.seeds(experiment, seeds, args.out, progress), progress)
        return say(args, result, studies.seeds_text(result))
    return run_once(args, experiment, progress)


def _numbers(flag: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers of at least 0" if kind is int else "numbers"
        raise InputError(f"{flag} {text}: expected {what} separated by commas") from None


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


def demo(args: Namespace) -> int:
    """Run ``fedfm demo``; return the exit code."""
    from fedfm.api import studies

    progress = watch()
    result = _study(args, lambda: studies.demo(args.out, args.seed, progress), progress)
    return say(args, result, studies.demo_text(result))
