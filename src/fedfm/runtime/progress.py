"""Progress: what a run tells whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfm.core.messages import Excluded
from fedfm.runtime.run_directory import Run


class Progress:
    """What a watcher is told; this one is told and says nothing."""

    def started(self, run: Run, rounds: int, done: int) -> None:
        """The run begins, or goes on after ``done`` rounds."""

    def client(self) -> None:
        """A client has finished."""

    def round(self, line: Mapping[str, Any]) -> None:
        """A round is committed and evaluated; ``line`` is its line of metrics.jsonl."""

    def excluded(self, excluded: Excluded) -> None:
        """A client was left out of a round."""

    def notice(self, text: str) -> None:
        """Something that the user should know."""

    def finished(self) -> None:
        """No more of this run."""


class EpochProgress:
    """What the watcher of a pretraining is told; this one is told and says nothing."""

    def started(self, epochs: int, done: int, steps: int) -> None:
        """So many epochs of so many steps; ``done`` of them were committed before."""

    def step(self) -> None:
        """A batch is done."""

    def epoch(self, line: Mapping[str, Any]) -> None:
        """An epoch is committed; ``line`` has its figures."""

    def finished(self) -> None:
        """No more."""
