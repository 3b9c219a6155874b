"""Engines: how requests reach clients. They know no algorithm."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedfm.api import Progress
    from fedfm.rundir import Run


def start(run: Run, stop: Callable[[], bool], progress: Progress) -> dict[str, Any]:
    """Run ``run`` on the engine that its experiment names; returns the result line."""
    # The client libraries are told before they are imported: nothing here calls home.
    for name in ("HF_HUB_DISABLE_TELEMETRY", "FLWR_DISABLE_UPDATE_CHECK"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    match run.experiment.run.engine:
        case "local":
            from fedfm.engines.local import start as begin
        case "simulation":
            from fedfm.engines.simulation import start as begin
        case _:
            from fedfm.engines.deployment import start as begin
    return begin(run, stop, progress)
