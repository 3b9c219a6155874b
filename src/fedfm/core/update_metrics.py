"""What clients note beside their updates, by name; and the names that are the server's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedfm.errors import E_FIELD, E_SIZE, ClientFault

MOST = 100  # metrics of one update
LONGEST = 100  # characters of a name

BEFORE, LOSS_BEFORE = "accuracy_before_aggregation", "loss_before_aggregation"  # of the client's own model
JUDGED = "judged_before_aggregation"  # 1 where there are these: the mean is the share of clients that have test rows
PASSES = "passes_beside"  # passes over the client's rows beside the optimiser's, forward

# What the server writes into a round's line of metrics.jsonl, or into the result. A client's "loss" stands there as
# "train_loss"; what the server's own judgement is called, no client may say.
SERVERS = frozenset(
    {
        "accuracy",
        "attack_success",
        "attackers",
        "balanced_accuracy",
        "bytes_down",
        "bytes_up",
        "client_accuracy",
        "client_loss",
        "cohort",
        "details",
        "engine",
        "epsilon",
        "excluded",
        "global_accuracy",
        "local_accuracy",
        "local_loss",
        "local_rouge_1",
        "macro_f1",
        "method",
        "params_sha256",
        "perplexity",
        "rouge_1",
        "round",
        "rounds",
        "run",
        "seconds",
        "seed",
        "server_accuracy",
        "server_client_accuracy",
        "server_client_loss",
        "server_loss",
        "server_sha256",
        "train_loss",
        "val_loss",
    }
)


def check(metrics: Mapping[str, Any]) -> None:
    """Refuse metrics that nobody notes.

    Raises:
        ClientFault: E_SIZE, too many, or a long name; E_FIELD, a name of the server's.
    """
    if len(metrics) > MOST:
        raise ClientFault(E_SIZE, f"{len(metrics)} metrics: expected at most {MOST}")
    for name in metrics:
        if name in SERVERS:
            raise ClientFault(E_FIELD, f'metrics: "{name}" is a name of the server\'s own figures')
        if isinstance(name, str) and len(name) > LONGEST:
            raise ClientFault(E_SIZE, f"metrics: a name of {len(name)} characters, expected at most {LONGEST}")


class Means:
    """What updates note, as means weighted like the updates."""

    def __init__(self) -> None:
        self._weight, self._sums = 0.0, dict[str, float]()

    def add(self, update: Any) -> None:
        """One update more."""
        self._weight += update.weight
        for name, value in update.metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + update.weight * value

    def means(self) -> dict[str, float]:
        """By name; without those that overflowed: each value was finite, their weighted sum need not be."""
        means = {name: total / self._weight for name, total in self._sums.items()}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}
