"""Start a run on the engine that its experiment names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedfm.runtime.partitioned import Partitioned
    from fedfm.runtime.progress import Progress
    from fedfm.runtime.run_directory import Run

_ENGINES = {
    "local": "fedfm.engines.local.engine",
    "simulation": "fedfm.engines.flower.simulation",
    "deployment": "fedfm.engines.flower.deployment",
    "folder": "fedfm.engines.folder.engine",
}


def start(
    run: Run,
    stop: Callable[[], bool],
    progress: Progress,
    population: Callable[[], Partitioned] | None = None,
    silos: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """Run ``run`` on the engine that its experiment names; returns the result line.

    Args:
        population: returns rows and model if they are in memory already (local engine only).
        silos: files of silos by name; each becomes a node on loopback (deployment engine only).
    """
    # Switch off telemetry and update checks; this must happen before the libraries are imported.
    for name in ("HF_HUB_DISABLE_TELEMETRY", "FLWR_DISABLE_UPDATE_CHECK"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if population is not None:
        from fedfm.engines.local.engine import start as here

        return here(run, stop, progress, population)
    if silos is not None:
        from fedfm.engines.flower.deployment import start as deployed

        return deployed(run, stop, progress, silos)
    from fedfm.engines.known_clients import check_known

    check_known(run.experiment)
    engine = import_module(_ENGINES[run.experiment.run.engine])
    return engine.start(run, stop, progress)  # type: ignore[no-any-return]
