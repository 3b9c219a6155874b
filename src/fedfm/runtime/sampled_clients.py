"""What a run says about the clients that it does not ask, if only a share of the clients is asked for scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedfm.core.client import ClientId
from fedfm.runtime.predictions import keeps_parts, personal
from fedfm.runtime.run_directory import Run
from fedfm.runtime.who_scores import why_unasked

if TYPE_CHECKING:
    from fedfm.config.experiment import Experiment


def forewarn(experiment: Experiment) -> list[str]:
    """Return a notice before a run whose last round costs as much as the federation is large."""
    if not personal(experiment.method):
        return []
    asked = ", asks each client for its part of it" if keeps_parts(experiment.method) and not experiment.privacy else ""
    return [
        f'method.name = "{experiment.method_name}": each client has its own model, so after the last round the run '
        f"makes the models of all clients{asked} and stores them in clients/, however few of them a round asks"
    ]


def summarise(
    run: Run, clients: Sequence[ClientId], evaluated: Sequence[ClientId], lines: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Return entries of the result's ``details``, and notices.

    Args:
        evaluated: the clients that are asked for scores.
        lines: the lines of ``metrics.jsonl``.
    """
    asked = () if why_unasked(run.experiment) else evaluated
    trained = clients if run.experiment.method.needs.pooled else [c for line in lines for c in line["cohort"]]
    never = len(set(clients).difference(asked, trained))
    fraction, of = run.experiment.run.evaluate_fraction, len(clients)
    details = {"evaluated": {"fraction": fraction, "clients": len(asked), "of": of}, "never_asked": never}
    notices = [
        f"scores by clients are of a sample, {len(asked):,} of {of:,} clients, drawn once from run.seed "
        f"(run.evaluate_fraction = {fraction:g}): client_accuracy names them, and local_accuracy and other means over "
        "clients are means of this sample"
    ]
    if never:
        notices.append(
            f"{never:,} of {of:,} clients were asked neither to train nor for scores; in metrics.jsonl, cohort and "
            "client_accuracy name those that were asked"
        )
    return details, notices if 0 < len(asked) < of else notices[1:]
