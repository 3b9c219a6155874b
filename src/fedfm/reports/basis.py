"""Choose the accuracy by which runs are compared. It must be measured on the same rows in all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedfm.core.metric_names import ACCURACY, GLOBAL_ACCURACY, LOCAL_ACCURACY
from fedfm.reports.read import RunFiles
from fedfm.reports.text import finite

ROWS = {
    GLOBAL_ACCURACY: "on all test rows",
    LOCAL_ACCURACY: "averaged over the clients, each on its own test rows",
    ACCURACY: "as each run states it",
}


class Basis(NamedTuple):
    """A score that all runs have.

    Attributes:
        key: the score's key in a run's metrics.
        rows: a description of the rows on which it was measured.
        mixed: whether the headline ``accuracy`` is measured on different rows in different runs.
    """

    key: str
    rows: str
    mixed: bool


def basis(runs: Sequence[RunFiles]) -> Basis:
    """The accuracy that all runs have, measured on the same rows.

    Candidates are the headline ``accuracy``, the accuracy on all test rows, and the mean of the clients' accuracies;
    the first that has the same meaning in all runs is chosen. The headline of a method with one model is measured on
    all test rows. The headline of a method with a model for each client is the mean over clients.
    """
    meant = {meaning(run) for run in runs if finite(run.value(ACCURACY))}
    if len(meant) <= 1:
        return Basis(ACCURACY, ROWS[next(iter(meant), ACCURACY)], mixed=False)
    key = next(
        (key for key in (GLOBAL_ACCURACY, LOCAL_ACCURACY) if all(finite(run.value(key)) for run in runs)), ACCURACY
    )
    return Basis(key, ROWS[key], mixed=True)


def meaning(run: RunFiles) -> str:
    """The key of the metric that has the same value as the run's headline ``accuracy``."""
    stated = run.value(ACCURACY)
    return next((key for key in (GLOBAL_ACCURACY, LOCAL_ACCURACY) if run.value(key) == stated), ACCURACY)


def unlike_settings(experiments: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """The settings that differ: dotted key -> one value per experiment, None if an experiment lacks the key."""
    flat = [_flat(experiment) for experiment in experiments]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = {key: [one.get(key) for one in flat] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def _flat(table: Mapping[str, object], start: str = "") -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in table.items():
        name = f"{start}{key}"
        out |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return out
