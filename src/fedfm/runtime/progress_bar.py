"""Progress on standard error: a bar on a terminal, lines in a log file."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.core.messages import Excluded
from fedfm.core.text import visible
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run

_LOGGED = 20.0  # seconds between two lines of a log file


class Bar(Progress):
    """One bar per run. It shows the completed rounds, this round's clients, and the last accuracy or perplexity.

    A log file gets at most one line in 20 seconds.

    Attributes:
        path: the run directory, once it exists; a message names this path if the run stops.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._bar: Any = None
        self._name, self._rounds, self._clients = "", 0, 0
        self._figures: dict[str, str] = {}
        self._written = -math.inf  # time of the last line

    def started(self, run: Run, rounds: int, done: int) -> None:
        self.path, self._name, self._rounds, self._written = run.path, visible(run.experiment.name), rounds, -math.inf
        if not can_redraw():
            return
        from tqdm import tqdm

        self._bar = tqdm(total=rounds, initial=done, desc=self._name, unit="round", file=sys.stderr, **wide())

    def client(self) -> None:
        self._clients += 1
        if self._bar is not None:
            self._figures["client"] = str(self._clients)
            self._bar.set_postfix(self._figures, refresh=time.monotonic() - self._bar.last_print_t > 0.2)

    def round(self, line: Mapping[str, Any]) -> None:
        self._clients = 0
        self._figures = {k: f"{line[k]:.3f}" for k in ("accuracy", "perplexity") if line.get(k) is not None}
        if self._bar is not None:
            self._bar.set_postfix(self._figures, refresh=False)
            # A resumed run may evaluate its first round again, and then reports this round twice.
            self._bar.update(line["round"] - self._bar.n)
        elif line["round"] == self._rounds or time.monotonic() - self._written > _LOGGED:
            self._written = time.monotonic()
            figures = [f"{key} {value}" for key, value in self._figures.items()] + [f"{line['seconds']:.1f} s"]
            text = f"{self._name}: round {line['round']} of {self._rounds}, {', '.join(figures)}"
            sys.stderr.write(f"{text}\n")

    def excluded(self, excluded: Excluded) -> None:
        self.notice(str(excluded))

    def notice(self, text: str) -> None:
        """Print one line above the bar; ``visible`` escapes line breaks, e.g. in a client's name."""
        from tqdm import tqdm

        tqdm.write(f"fedfm: {visible(text)}", file=sys.stderr)

    def finished(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def can_redraw() -> bool:
    """Whether a carriage return can redraw a line, as on a terminal and in a notebook."""
    return (sys.stderr is not None and sys.stderr.isatty()) or "ipykernel" in sys.modules


def wide() -> dict[str, Any]:
    """Return settings for the bar's width; in containers and over serial lines the terminal may report a width of 0."""
    try:
        known = os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):  # a notebook raises these
        known = True
    return {"dynamic_ncols": True} if known else {"ncols": 80, "nrows": 24}
