"""Metrics that clients send with their updates, and the names that are reserved for the server."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from fedfm.core.metric_names import LOCAL_LOSS, METRICS, PERPLEXITY, SHARES
from fedfm.errors import E_FIELD, E_SIZE, ClientFault, RunError

MOST = 100  # largest number of metrics of one update
LONGEST = 100  # characters of a name
_ROUNDING = 1e-6  # of means of metrics, which hidden sums round

BEFORE, LOSS_BEFORE = "accuracy_before_aggregation", "loss_before_aggregation"  # scores of the client's trained model
JUDGED = "judged_before_aggregation"  # 1 from a client with these two scores; its mean is the share of such clients
SENT = "sent/"  # prefix of scores of the model that the client received, as in "sent/test/accuracy"
PASSES = "passes_beside"  # number of forward passes over the client's rows, not counting the optimiser's
# Largest values of metrics that no rows exceed; the smallest is 0. The result states them as measured.
_LARGEST = {BEFORE: 1.0, JUDGED: 1.0, PASSES: 1000.0}

# Keys that the server writes into a line of metrics.jsonl or into the result. No client may send one of these names,
# nor the name of a score of the run's task (check_figures). A client's "loss" is written there as "train_loss".
# fmt: off
SERVERS = frozenset({
    *SHARES, PERPLEXITY, LOCAL_LOSS, METRICS, f"client_{METRICS}", f"local_{METRICS}",
    "attack_success", "attackers", "bytes_down", "bytes_up", "class_counts",
    "client_accuracy", "client_accuracy_before_aggregation", "client_loss_before_aggregation",
    "client_loss", "client_scored_round", "client_val_loss", "client_val_rows", "clock", "cohort", "confusion", "crc32",
    "details", "engine", "epsilon", "excluded",
    "largest_staleness", "method", "params_sha256", "round", "rounds",
    "run", "seconds", "seed", "server_accuracy", "server_client_accuracy", "server_client_loss", "server_loss",
    "server_sha256", "staleness", "synchronous_clock", "train_loss", "transport", "val_loss", "warnings",
})
# fmt: on


def check(metrics: Mapping[str, Any]) -> None:
    """Refuse metrics that are too many, have a wrong name, or a value that no rows have.

    Raises:
        ClientFault: E_SIZE, too many metrics or a long name; E_FIELD, a name reserved for the server, or such a value.
    """
    if len(metrics) > MOST:
        raise ClientFault(E_SIZE, f"{len(metrics)} metrics: expected at most {MOST}")
    for name, most in _LARGEST.items():
        if name in metrics and not -_ROUNDING <= metrics[name] <= most + _ROUNDING:
            raise ClientFault(E_FIELD, f"metrics: {name} is {metrics[name]}, expected a number in [0, {most:g}]")
    for name in metrics:
        _refuse(name, SERVERS)
        if isinstance(name, str) and len(name) > LONGEST:
            raise ClientFault(E_SIZE, f"metrics: a name of {len(name)} characters, expected at most {LONGEST}")


def check_figures(metrics: Iterable[str], figures: Iterable[str]) -> None:
    """Refuse metrics that have the name of a score of the run's task.

    Raises:
        ClientFault: E_FIELD, a name of such a score.
    """
    own = {name for figure in figures for name in (figure, f"local_{figure}")}
    for name in metrics:
        _refuse(name, own)


def _refuse(name: str, names: Collection[str]) -> None:
    if name in names:
        raise ClientFault(E_FIELD, f'metrics: "{name}" is a name of the server\'s own metrics')


def by_client(metrics: Mapping[str, float]) -> bool:
    """Whether metrics are about the client's own rows, so that the server stores them per client."""
    return JUDGED in metrics or any(name.startswith(SENT) for name in metrics)


class RoundMetrics(dict[str, float]):
    """Metrics of round t by name; reading a missing one ends the run.

    Args:
        why: returns the reason why a name is missing.
    """

    def __init__(self, t: int, why: Callable[[str], str]) -> None:
        super().__init__()
        self._round, self._why = t, why

    def __missing__(self, name: str) -> float:
        raise RunError(f'round {self._round}: fed.metrics has no "{name}": {self._why(name)}')


class Weighed(Protocol):
    """The weight and the metrics of an update."""

    @property
    def weight(self) -> float:
        """Its weight in the mean."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The client's metrics by name."""


class Means:
    """Means of the metrics in updates, weighted like the updates."""

    def __init__(self) -> None:
        self._weight, self._sums = 0.0, dict[str, float]()

    def add(self, update: Weighed) -> None:
        self._weight += update.weight
        for name, value in update.metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + update.weight * value

    def means(self) -> dict[str, float]:
        """Means by name, except those whose weighted sum overflowed."""
        means = {name: total / self._weight for name, total in self._sums.items()}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}
