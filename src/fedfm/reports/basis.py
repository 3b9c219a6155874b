"""The accuracy by which runs are compared: on the same rows for all runs."""

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
        key: of a run's metrics.
        rows: the rows on which it was measured, in words.
        mixed: the meaning of ``accuracy`` differs among the runs.
    """

    key: str
    rows: str
    mixed: bool


def basis(runs: Sequence[RunFiles]) -> Basis:
    """The accuracy that all runs state on the same rows: the headline, that on all test rows, or the clients' mean.

    The headline of a method with one model is measured on all test rows; with a model for each client it is the mean.
    """
    meant = {meaning(run) for run in runs if finite(run.value(ACCURACY))}
    if len(meant) <= 1:
        return Basis(ACCURACY, ROWS[next(iter(meant), ACCURACY)], mixed=False)
    key = next(
        (key for key in (GLOBAL_ACCURACY, LOCAL_ACCURACY) if all(finite(run.value(key)) for run in runs)), ACCURACY
    )
    return Basis(key, ROWS[key], mixed=True)


def meaning(run: RunFiles) -> str:
    """The key of the figure that is a run's headline accuracy."""
    stated = run.value(ACCURACY)
    return next((key for key in (GLOBAL_ACCURACY, LOCAL_ACCURACY) if run.value(key) == stated), ACCURACY)


def unlike_settings(experiments: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Dotted key -> a value for each experiment, of the keys that differ; None where an experiment has no such key."""
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
