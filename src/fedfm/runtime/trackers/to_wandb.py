"""Weights & Biases: a run in ``WANDB_DIR``, or else in the library's default, ``wandb/`` of the working directory.

Data leave the machine only if ``WANDB_MODE=online``. The library's files include links. A run directory must not
contain links, so these files are outside it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from fedfm.runtime.run_directory import Run
from fedfm.runtime.trackers.tracker import Tracker, figures, models, settings


class WandB(Tracker):
    """Logs the configuration, figures by round, and a summary with the result and the models' folders."""

    extra: ClassVar[str] = "wandb"

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None

    def start(self, run: Run, done: int) -> int:
        text = f"{run.manifest['created']} {run.experiment.name} {run.experiment.run.seed}"
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedfm"),
            name=run.experiment.name,
            id=hashlib.sha256(text.encode()).hexdigest()[:16],
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=settings(run),
            # Store neither standard output nor the user's code or git state.
            settings=self._wandb.Settings(console="off", disable_code=True, disable_git=True),
        )
        return done - 1  # the last round may be missing, and a round that is logged twice counts once

    def log(self, t: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=t)

    def finish(self, run: Run, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            self._run.summary.update({f"result/{k}": v for k, v in figures(result).items()} | models(run, result))
        self._run.finish(exit_code=0 if result is not None else 1)
