"""Progress on standard error for a pretraining, a distillation or an audit."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from fedfm.runtime import progress_bar
from fedfm.runtime.progress import AuditProgress, EpochProgress


class Epochs(EpochProgress):
    """A bar that counts the steps of a pretraining or a distillation; each epoch adds a line of text."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._steps, self._epochs = 0, 0

    def started(self, epochs: int, done: int, steps: int) -> None:
        """Open the bar. A log file gets no bar, only the lines of epochs."""
        from tqdm import tqdm

        self._steps, self._epochs = steps, epochs
        self._bar = tqdm(
            total=epochs * steps,
            initial=done * steps,
            desc=f"epoch {done + 1}/{epochs}",
            unit="step",
            file=sys.stderr,
            leave=False,
            disable=not sys.stderr.isatty(),
            **progress_bar.wide(),
        )

    def step(self) -> None:
        self._bar.update(1)

    def epoch(self, line: Mapping[str, Any]) -> None:
        from tqdm import tqdm

        figures = [f"epoch {line['epoch']}/{self._epochs}", f"lr {line['learning_rate']:g}"]
        figures[1:1] = [line["stage"]] if "stage" in line else []
        figures += [f"train loss {line['train_loss']:.4f}"]
        shown = ("accuracy", "perplexity", "distance", "outside")
        figures += [f"{key} {line[key]:.4f}" for key in shown if line.get(key) is not None]
        tqdm.write("  ".join([*figures, f"{line['seconds']:.1f} s"]), file=sys.stderr)
        self._bar.set_description(f"epoch {line['epoch'] + 1}/{self._epochs}", refresh=False)

    def finished(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Attacks(AuditProgress):
    """On a terminal, a bar that counts an audit's completed attacks; a log file gets lines of text instead."""

    def __init__(self) -> None:
        self._bar: Any = None

    def started(self, attacks: int) -> None:
        if not progress_bar.can_redraw():
            return
        from tqdm import tqdm

        self._bar = tqdm(
            total=attacks, desc="audit", unit="attack", file=sys.stderr, leave=False, **progress_bar.wide()
        )

    def begins(self, name: str, seconds: float) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(name)

    def done(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def finished(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
