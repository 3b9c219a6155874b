"""A silo's record of the sums that it sent in a run, so that ``fedfm silo sums`` writes those sums and no others.

The server gives the manifest from which the silo computes its sums again. Another seed, model or share of test rows
gives sums of other rows, and the difference of two sums may be a single row. Rows that changed since the run, and a
part that was empty because the silo failed, give sums that are not in the total. A manifest without the run's noise
gives exact sums where noisy ones were sent. So the record has digests of the rows, the model, the method and the
protection behind the last message. It stays in the run's folder at the silo.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.kept_sums import KeepsSums
from fedfm.core.text import to_json
from fedfm.data.table import fingerprint
from fedfm.errors import InputError, NotWritten
from fedfm.runtime.partitioned import Partitioned
from fedfm.sites.ledger import Entry

_FILE = "sent_sums.json"
_RUNS = ".fedfm/runs"  # next to the silo's file, see fedfm.engines.flower.client_stub


def record_of(experiment: Experiment, population: Partitioned) -> dict[str, Any] | None:
    """What the silo's sums depend on; None if the method has none that a silo could disclose later."""
    if not isinstance(experiment.method, KeepsSums):
        return None
    (rows,) = population.federated.clients.values()
    settings = experiment.to_dict()
    method = to_json([settings["method"], experiment.run.seed])
    protection = to_json([settings.get("privacy"), settings.get("aggregation")])
    return {
        "rows": fingerprint(population.federated.table.take(rows.train)),
        "model": dict(population.model.fingerprints),
        "method": hashlib.sha256(method.encode()).hexdigest(),
        "protection": hashlib.sha256(protection.encode()).hexdigest(),
    }


def write(folder: Path, record: dict[str, Any] | None, fault: str) -> None:
    """Keep what the silo's message of a run depends on.

    Args:
        folder: the run's folder at the silo.
        fault: the code of the failure if the message is an empty part of a hidden sum; then no sums were sent.
    """
    if record is not None:
        with contextlib.suppress(NotWritten, OSError):  # a full disk stops no message that the ledger has
            storage.write_atomic(folder / _FILE, to_json({} if fault else record).encode(), 0o600)


def check(path: Path, name: str, record: dict[str, Any] | None, ledger: list[Entry]) -> str:
    """Refuse sums that the silo did not send.

    Args:
        path: the silo's file.
        name: the method's name.
        record: that of the run whose sums are asked for.

    Returns:
        A sentence if nobody can tell, since an earlier version kept no record; else "".

    Raises:
        InputError: the silo sent no sums of this method, or sent others.
    """
    files = [*(path.resolve().parent / _RUNS).glob(f"*/silo/{_FILE}")]
    kept = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if record and any(one and record | one == record for one in kept):  # an earlier version kept no protection
        return ""
    if not any(entry.method == name and entry.handler.startswith("train.") for entry in ledger):
        raise InputError(f"{path}: its ledger has no message of {name}, so this silo's sums are in no total")
    if files:
        raise InputError(
            f"{path}: this silo sent no such sums: its rows, its share of test rows, the model, the method or the "
            "noise or secrecy of its sums are others than in its runs, or its part of the sum was empty (errors.log of "
            "the run says why)"
        )
    return "no record shows whether this silo sent the same sums in the run"
