"""The commands that run experiments. Each imports the heavy libraries that it needs."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fedfm.api.terminal import hint_on_stop, say
from fedfm.cli.imports import quick_imports
from fedfm.cli.running import experiment_of, hint_for_rounds, run_once, summary, tell_missing, watch


def run(args: Namespace) -> int:
    """Run ``fedfm run``; return the exit code."""
    experiment = experiment_of(args)
    progress = watch()
    if args.tune is not None or args.seeds is not None or args.baselines:
        from fedfm.cli.study_commands import run_study

        return run_study(args, experiment, progress)
    return run_once(args, experiment, progress)


def resume(args: Namespace) -> int:
    """Run ``fedfm resume``; return the exit code."""
    with quick_imports():
        from fedfm.api import execute
    from fedfm.core.overrides import parse_overrides

    progress = watch()
    changes = parse_overrides(args.set)
    how = {"accept_loss": args.accept_loss, "rounds": args.rounds, "changes": changes}
    with hint_on_stop(lambda: hint_for_rounds(progress)):
        result = execute.resume(args.run, progress=progress, **how)
    tell_missing(Path(result["run"]))
    return say(args, result, lambda: summary(result))
