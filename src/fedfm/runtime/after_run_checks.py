"""Notices about a finished run, which follow from its own metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fedfm.config.experiment import Experiment
from fedfm.models import derived_modules
from fedfm.training import TrainsLocally

_RISE = 1.05  # smallest ratio of the last test loss to the lowest test loss that counts as a rise, not as noise
_FALL = 0.01  # smallest fall of the accuracy that does not count as noise


def overfitting_notices(lines: Sequence[Mapping[str, Any]], experiment: Experiment) -> list[str]:
    """Return a notice if the lines of ``metrics.jsonl`` show that in the end test loss rose and accuracy fell."""
    known = [(line["round"], line["loss"], line["accuracy"]) for line in lines if _both(line)]
    if len(known) < 3:
        return []
    last, trained = known[-1], known[1:]
    # An untrained model predicts uniformly, so round 0 may have the lowest loss: also look at the others alone.
    lows = [min(points, key=lambda point: point[1]) for points in (known, trained)]
    worse = [low for low in lows if last[1] >= _RISE * low[1] and last[2] <= low[2] - _FALL]
    if not worse:
        return []
    best, lowest, reached = worse[0]
    return [
        f"the loss on the test rows rose from {lowest:.3g} in round {best} to {last[1]:.3g}, and the accuracy fell "
        f"from {reached:.3f} to {last[2]:.3f}: the model overfits; {_cure(experiment)}"
    ]


def _cure(experiment: Experiment) -> str:
    """Name settings of this experiment that can prevent overfitting."""
    from fedfm.config.advice import stays_valid

    run, data, found = experiment.run, experiment.data, ["fewer rounds"]
    if isinstance(experiment.method, TrainsLocally):
        found.append("a smaller method.local.learning_rate")
    stopping = {"run.patience": 3} if data.val_fraction else {"data.val_fraction": 0.1, "run.patience": 3}
    if not run.patience and stays_valid(experiment, stopping):
        found.append(f"{' with '.join(stopping)}, which keeps the best round")
    advice = f"take {', '.join(found[:-1])}{' or ' if found[1:] else ''}{found[-1]}"
    if experiment.privacy is not None:
        advice += "; each run on the same rows spends its own epsilon, so choose settings on other rows"
    return advice


def outside(module: nn.Module) -> list[str]:
    """Return a notice if arguments of the model's polynomials were outside their intervals on this process's rows.

    The polynomials approximate softmax, LayerNorm and GELU, but only inside these intervals.
    """
    counts = derived_modules.violations(module).values()
    if not (far := sum(n for n, _ in counts)):
        return []
    return [
        f"{far:,} of {sum(total for _, total in counts):,} arguments of the model's polynomials were outside their "
        "intervals; if a row is far outside, its activations overflow, and a head treats the row as unknown; "
        "distil the model on rows like these"
    ]


def _both(line: Mapping[str, Any]) -> bool:
    return all(line.get(key) is not None and math.isfinite(line[key]) for key in ("loss", "accuracy"))
