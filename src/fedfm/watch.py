"""A progress bar on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.federation import Excluded
from fedfm.progress import EpochProgress, Progress
from fedfm.rundir import Run
from fedfm.writing import visible


class Bar(Progress):
    """One bar a run: rounds done, clients of the current one, the last accuracy or perplexity.

    Attributes:
        path: the run directory, once there is one; what to resume if something stops it.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._bar: Any = None
        self._follow, self._clients = False, 0
        self._figures: dict[str, str] = {}

    def started(self, run: Run, rounds: int, done: int) -> None:
        """Open the bar; in a log file it is written a few times a minute, on a terminal it follows the clients."""
        from tqdm import tqdm

        self.path = run.path
        self._follow = sys.stderr.isatty()
        self._bar = tqdm(
            total=rounds,
            initial=done,
            desc=visible(run.experiment.name),
            unit="round",
            file=sys.stderr,
            dynamic_ncols=True,
            mininterval=0.1 if self._follow else 20.0,
        )

    def client(self) -> None:
        """Count a client."""
        self._clients += 1
        if self._bar is not None and self._follow:
            self._figures["client"] = str(self._clients)
            self._bar.set_postfix(self._figures, refresh=time.monotonic() - self._bar.last_print_t > 0.2)

    def round(self, line: Mapping[str, Any]) -> None:
        """Advance."""
        self._clients = 0
        if self._bar is None:
            return
        self._figures = {k: f"{line[k]:.3f}" for k in ("accuracy", "perplexity") if line.get(k) is not None}
        self._bar.set_postfix(self._figures, refresh=False)
        self._bar.update(line["round"] - self._bar.n)  # a resumed run may judge the round again that it goes on from

    def excluded(self, excluded: Excluded) -> None:
        """Say who, what and why."""
        self.notice(str(excluded))

    def notice(self, text: str) -> None:
        """Print above the bar, on one line: who gives a client its name cannot have it look like one of ours."""
        from tqdm import tqdm

        tqdm.write(f"fedfm: {visible(text)}", file=sys.stderr)

    def finished(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Epochs(EpochProgress):
    """The bar of a pretraining: its steps, and a line an epoch."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._steps, self._epochs = 0, 0

    def started(self, epochs: int, done: int, steps: int) -> None:
        """Open the bar; in a log file only the lines of epochs are written."""
        from tqdm import tqdm

        self._steps, self._epochs = steps, epochs
        self._bar = tqdm(
            total=epochs * steps,
            initial=done * steps,
            desc=f"epoch {done + 1}/{epochs}",
            unit="step",
            file=sys.stderr,
            dynamic_ncols=True,
            leave=False,
            disable=not sys.stderr.isatty(),
        )

    def step(self) -> None:
        """Advance."""
        self._bar.update(1)

    def epoch(self, line: Mapping[str, Any]) -> None:
        """Print its figures above the bar."""
        from tqdm import tqdm

        figures = [f"epoch {line['epoch']}/{self._epochs}", f"lr {line['learning_rate']:g}"]
        figures += [f"train loss {line['train_loss']:.4f}"]
        figures += [f"{key} {line[key]:.4f}" for key in ("accuracy", "perplexity") if line[key] is not None]
        tqdm.write("  ".join([*figures, f"{line['seconds']:.1f} s"]), file=sys.stderr)
        self._bar.set_description(f"epoch {line['epoch'] + 1}/{self._epochs}", refresh=False)

    def finished(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
