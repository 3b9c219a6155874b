"""TensorBoard: event files in ``tensorboard/`` of the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from fedfm.runtime.run_directory import Run
from fedfm.runtime.trackers.tracker import Tracker, figures, models, settings


class TensorBoard(Tracker):
    """Logs scalars by round, and settings and result as texts."""

    extra: ClassVar[str] = "tensorboard"

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make: Any = SummaryWriter
        self._writer: Any = None

    def start(self, run: Run, done: int) -> int:
        # An earlier process may have written rounds after the last commit. So all events are removed, and the committed
        # rounds are written again.
        self._writer = self._make(log_dir=str(run.path / "tensorboard"), purge_step=0)
        rows = "\n".join(f"| {key} | {value} |" for key, value in settings(run).items())
        self._writer.add_text("settings", f"| key | value |\n|---|---|\n{rows}", 0)
        self._writer.flush()
        return -1

    def log(self, t: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, t)
        self._writer.flush()

    def finish(self, run: Run, result: Mapping[str, Any] | None) -> None:
        if result is not None:
            t = int(result["rounds"])
            for name, value in figures(result).items():
                self._writer.add_scalar(f"result/{name}", value, t)
            text = json.dumps(dict(result) | models(run, result), indent=1)
            self._writer.add_text("result", f"```\n{text}\n```", t)
        self._writer.close()
