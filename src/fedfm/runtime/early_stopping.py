"""Early stopping: a run ends after ``run.patience`` rounds without a better validation loss; the best model is kept."""

from __future__ import annotations

from typing import Any

from fedfm.runtime.run_directory import Run


def best_round(run: Run) -> int | None:
    """Return the best round so far; None without ``run.patience`` or before the first validation loss."""
    if not run.experiment.run.patience:
        return None
    from fedfm.runtime import validation_losses

    return validation_losses.best_round(_complete(run))


def patience_over(run: Run) -> bool:
    """Whether the last round with a validation loss is ``run.patience`` rounds or more after the best round."""
    if not (patience := run.experiment.run.patience):
        return False
    from fedfm.runtime import validation_losses

    lines = _complete(run)
    best, last = validation_losses.best_round(lines), validation_losses.last_validated(lines)
    return best is not None and last is not None and last - best >= patience


def _complete(run: Run) -> list[dict[str, Any]]:
    """Return the lines of the rounds after which the method's model is complete."""
    return [line for line in run.metrics() if line["round"] >= run.experiment.method.traits.complete_from]


def summarise(run: Run, t: int, of: int) -> tuple[dict[str, object], list[str]]:
    """Return entries of the result's ``details``, and notices. The run has t rounds and the model of round ``of``."""
    patience, planned = run.experiment.run.patience, run.experiment.method.rounds
    details: dict[str, object] = {}
    notices: list[str] = []
    if t < planned:
        best = best_round(run)
        details["stopped_early"] = {"best_round": best, "planned_rounds": planned}
        notices.append(
            f"stopped after round {t} of {planned}: no validation loss was below that of round {best} "
            f"(run.patience = {patience})"
        )
    if patience:
        details["model_of_round"] = of
        notices.append(f"the model is that of round {of}")
    return details, notices
