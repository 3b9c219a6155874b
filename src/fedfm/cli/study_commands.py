"""The commands that run several experiments."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fedfm.api.terminal import hint_on_stop, say
from fedfm.cli.running import run_once, watch
from fedfm.errors import InputError

if TYPE_CHECKING:
    from fedfm.config.experiment import Experiment
    from fedfm.runtime.progress_bar import Bar


def run_study(args: Namespace, experiment: Experiment, progress: Bar) -> int:
    """Run the several experiments that --seeds, --baselines or --tune ask for."""
    from fedfm.api import studies

    if args.tune is not None:
        rates = _numbers("--tune", args.tune, float)
        with hint_on_stop(lambda: _hint(args, progress)):
            experiment = studies.tune(experiment, rates, args.out, progress)
    if args.seeds is not None and args.baselines:
        raise InputError("--seeds and --baselines exclude each other")
    if args.baselines:
        with hint_on_stop(lambda: _hint(args, progress)):
            result = studies.with_baselines(experiment, args.out, progress)
        return say(args, result, studies.baselines_text(result))
    if args.seeds is not None:
        seeds = _numbers("--seeds", args.seeds, int)
        if min(seeds) < 0:
            raise InputError(f"--seeds {args.seeds}: expected whole numbers of at least 0")
        with hint_on_stop(lambda: _hint(args, progress)):
            result = studies.seeds(experiment, seeds, args.out, progress)
        return say(args, result, studies.seeds_text(result))
    return run_once(args, experiment, progress)


def _numbers(flag: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers of at least 0" if kind is int else "numbers"
        raise InputError(f"{flag} {text}: expected {what} separated by commas") from None


def _hint(args: Namespace, progress: Bar) -> str | None:
    """How to continue several experiments of which one has begun."""
    if progress.path is None or not progress.path.exists() or (getattr(args, "tune", None) and not args.out):
        return None
    return f"committed rounds are kept; continue with: the same command and --out {args.out or progress.path.parent}"


def demo(args: Namespace) -> int:
    """Run ``fedfm demo``; return the exit code."""
    from fedfm.api import studies

    progress = watch()
    with hint_on_stop(lambda: _hint(args, progress)):
        result = studies.demo(args.out, args.seed, progress)
    return say(args, result, studies.demo_text(result))
