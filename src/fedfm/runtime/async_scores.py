"""Scores between the asynchronous rounds of a deployment: each client scores the model that it last received.

A request for scores after each round would have to wait for clients that are training. So a client scores a received
model before it trains, and sends the scores with its update. The server keeps the newest scores of each client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fedfm.core.client import Client, ClientId
from fedfm.core.federation import Federation
from fedfm.core.method import Method
from fedfm.core.update_metrics import SENT
from fedfm.errors import ClientFault
from fedfm.linalg.params import Params
from fedfm.runtime.predictions import PARTS, scores, seen_by

FAILED = f"{SENT}failed"  # metric with value 1 in an update whose client could not score the received model
_NEWEST = (
    "newest_scores"  # key in the server's memory; its value maps client to {"round": round of the model, part: metrics}
)
_SLACK = 2  # scores older than this multiple of the largest usual age are left out of the mean


def of_sent(
    method: Method[Any],
    client: Client,
    payload: Mapping[str, Any],
    for_server: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, float]:
    """Client half: score the received model on the client's own rows; the scores become metrics of its update.

    If the request has several parameter vectors, there are no scores: only the method knows which vector is the model.

    Args:
        for_server: converts the scores to the form in which they may leave the silo.
    """
    sent = [value for value in payload.values() if isinstance(value, Params)]
    if len(sent) != 1:
        return {}
    seen, found = seen_by(method, client), dict[str, float]()
    for part, rows in zip(PARTS, (seen.data.test, seen.data.val), strict=True):
        if len(rows):
            values = for_server(scores(method, seen.model, sent[0], rows))
            known = {k: float(v) for k, v in values.items() if isinstance(v, (int, float)) and math.isfinite(v)}
            found |= {f"{SENT}{part}/{k}": v for k, v in known.items()}
    return found


class Newest:
    """Server half: the newest scores of each client, kept in the server's memory.

    Args:
        every: ``run.evaluate_every``.
        buffer: K, number of updates in a round.
    """

    def __init__(self, fed: Federation, every: int, buffer: int) -> None:
        self._fed, self._start = fed, dict[ClientId, dict[str, Any]]()
        # If n clients are equally fast, each replies every n/K rounds. The model that a reply scores is then n/K rounds
        # old, and 2 n/K rounds old when the next reply replaces these scores.
        self._oldest = every + _SLACK * 2 * len(fed.clients) / buffer

    def begin(self, part: str, values: Mapping[ClientId, Mapping[str, Any]]) -> None:
        """Record the scores of the start model, which the server has requested from the clients.

        Without these scores, the first lines of metrics would cover fewer clients than later ones.
        """
        for client, found in values.items():
            if found:
                known = {key: value for key, value in found.items() if value is not None}
                self._start.setdefault(client, {"round": 0})[part] = known

    def hear(self) -> list[ClientId]:
        """Record the scores that came with this round's updates.

        Call this before the round's commit, so that a resumed run has the scores, too.

        Returns:
            The clients that could not score the model that they received, or sent scores that no rows can have.
        """
        impossible = set[ClientId]()
        known = {**self._start, **self._fed.memory.get(_NEWEST, {})}
        for client, metrics in self._fed.client_metrics.items():
            values: dict[str, Any] = {}
            for name, value in metrics.items():
                part, _, key = name.removeprefix(SENT).partition("/")
                if name.startswith(SENT) and part in PARTS and key:
                    values.setdefault(part, {})[key] = value
            possible = {part: found for part, found in values.items() if self._possible(found)}
            if len(possible) < len(values):
                impossible.add(client)
            if values := possible:
                known[client] = {"round": self._fed.began[client] - 1, **values}
        self._fed.memory[_NEWEST] = known
        return sorted(impossible | {c for c, metrics in self._fed.client_metrics.items() if metrics.get(FAILED)})

    def _possible(self, found: Mapping[str, Any]) -> bool:
        """Whether the scores contain ``n``, as those of every honest client do, and some rows can have such scores."""
        try:
            self._fed.model.task.check_scores(found, self._fed.model.classes)
        except ClientFault:
            return False
        return "n" in found

    def rounds(self) -> dict[ClientId, int]:
        """Return for each client the round of the model that it scored; clients with outdated scores are absent."""
        known = self._fed.memory.get(_NEWEST, {})
        return {c: values["round"] for c, values in known.items() if self._fed.round - values["round"] <= self._oldest}

    def of(self, part: str) -> dict[ClientId, dict[str, Any]]:
        """Return each client's metrics on its ``test`` or ``val`` rows; empty if it has reported none recently."""
        known, lately = self._fed.memory.get(_NEWEST, {}), self.rounds()
        return {c: dict(known[c].get(part, {})) if c in lately else {} for c in self._fed.clients}
