"""Measure how far a replay on a GPU is from its run. Sums on a GPU have no fixed order, so bits differ."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedfm.core.client import ClientId
from fedfm.linalg.params import Params
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run


def off_the_cpu(run: Run, population: Partitioned) -> bool:
    """Whether the run or its replay computes on a device whose sums have no fixed order."""
    kinds = {str((run.manifest.get("device") or {}).get("type", "cpu")), population.model.device.type}
    return kinds != {"cpu"}


def distance(
    replayed: Mapping[ClientId, Params], recorded: Mapping[ClientId, Params], start: Mapping[ClientId, Params]
) -> float:
    """Largest L2 distance of a client's replayed parameters from the recorded ones, relative to the change by training.

    It is infinite if names or shapes differ, or if parameters that the run left unchanged differ.
    """
    found = 0.0
    for client, was in recorded.items():
        if client not in replayed or replayed[client].layout.entries != was.layout.entries:
            return math.inf
        apart = float((replayed[client] - was).norm())
        moved = (
            float((was - start[client]).norm())
            if start[client].layout.entries == was.layout.entries
            else float(was.norm())
        )
        found = max(found, apart and (apart / moved if moved else math.inf))
    return found
