"""Callbacks that report the progress of a run, a pretraining or an audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfm.core.messages import Excluded
from fedfm.runtime.run_directory import Run


class Progress:
    """Callbacks of a run. These do nothing; subclasses override them."""

    def started(self, run: Run, rounds: int, done: int) -> None:
        """The run begins, or continues after ``done`` of ``rounds`` planned rounds."""

    def client(self) -> None:
        """A client has finished its part of the round."""

    def round(self, line: Mapping[str, Any]) -> None:
        """A round is committed and evaluated; ``line`` is its line in metrics.jsonl."""

    def excluded(self, excluded: Excluded) -> None:
        """A client was left out of a round."""

    def notice(self, text: str) -> None:
        """A message for the user."""

    def finished(self) -> None:
        """The run has ended."""


class EpochProgress:
    """Callbacks of a pretraining. These do nothing; subclasses override them."""

    def started(self, epochs: int, done: int, steps: int) -> None:
        """Training begins: ``done`` of ``epochs`` epochs are committed already; an epoch has ``steps`` steps."""

    def step(self) -> None:
        """A training step has ended."""

    def epoch(self, line: Mapping[str, Any]) -> None:
        """An epoch is committed; ``line`` has its metrics."""

    def finished(self) -> None:
        """The pretraining has ended."""


class AuditProgress:
    """Callbacks of an audit. These do nothing; subclasses override them."""

    def started(self, attacks: int) -> None:
        """The audit begins with this number of attacks."""

    def begins(self, name: str, seconds: float) -> None:
        """One attack begins, or several that share a replay of the run; together they may take this many seconds."""

    def done(self) -> None:
        """An attack has ended."""

    def finished(self) -> None:
        """The audit has ended."""
