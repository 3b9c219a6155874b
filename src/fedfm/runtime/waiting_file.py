"""``private/waiting.json``: the silos that a server has asked, and those for which it waits.

The ServerApp of a deployment writes it; the process that submitted the run and ``fedfm watch`` read it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedfm.core import storage
from fedfm.core.client import ClientId
from fedfm.errors import RunError

WAITING = "private/waiting.json"


class Waiting(NamedTuple):
    """The content of the file.

    Attributes:
        asked: the node of each silo that was asked last.
        missing: silos that have not answered, and silos that took part before a stop and have not reconnected.
    """

    asked: dict[ClientId, int]
    missing: list[ClientId]


def read(run: Path) -> Waiting | None:
    """The file of a run directory; None if there is none."""
    try:
        found = json.loads((run / WAITING).read_text(encoding="utf-8"))
        return Waiting(dict(found["asked"]), [str(name) for name in found["missing"]])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Writer:
    """Writes the file of a run when it changes."""

    def __init__(self, run: Path) -> None:
        self._path, self._written = run / WAITING, dict[str, Any]()
        self._nodes = dict[str, int]()  # the nodes of clients that took part before a stop
        if (known := read(run)) is not None:
            self._nodes |= known.asked

    def tell(self, asked: Mapping[str, int], missing: Collection[str]) -> None:
        """Write the file if its content has changed.

        Args:
            asked: nodes of the clients that were asked.
            missing: clients that have not answered, and clients that took part before a stop and have not reconnected.
        """
        before = {name: self._nodes[name] for name in missing if name in self._nodes}
        record = {"asked": before | dict(asked), "missing": sorted(missing)}
        if record != self._written:
            self._written = record
            with contextlib.suppress(RunError):  # the file only informs people
                storage.write_atomic(self._path, json.dumps(record).encode(), 0o600, sync=False)
