"""What every gate of the campaign has: an outcome, sizes, forked runs, and the helpers of the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for _folder in ("tests", "tests/engines", "tests/sites", "tests/aggregation", "tests/properties"):
    sys.path.append(str(ROOT / _folder))
for _name in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
    os.environ.setdefault(_name, "0")
for _name in ("FLWR_DISABLE_UPDATE_CHECK", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


@dataclass
class Outcome:
    """What one gate found.

    Attributes:
        tried: how often something was tried, by what.
        failures: one line each; empty if the gate holds.
        figures: what was measured beside.
        skipped: why nothing, or less, was tried; "": nothing was left out.
    """

    tried: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)
    skipped: str = ""

    def count(self, what: str, times: int = 1) -> None:
        """Count tries."""
        self.tried[what] = self.tried.get(what, 0) + times

    def require(self, holds: bool, otherwise: str) -> None:
        """Note a failure."""
        if not holds:
            self.failures.append(otherwise)


@dataclass(frozen=True)
class Gate:
    """One gate.

    Attributes:
        goal: what has to hold, in words.
        attempt: tries it at a share of the full size, in a folder of its own; calls ``progress`` with a line now and
            then.
    """

    goal: str
    attempt: Callable[[float, Path, Callable[[str], None]], Outcome]


def scale_tries(full: int, size: float, least: int = 1) -> int:
    """A number of tries at this share of the full size."""
    return max(least, round(full * size))
