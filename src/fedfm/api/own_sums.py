"""A client's own sums of a finished run, as a file: with it the client leaves the run, or agrees to be valued.

The sums are those of the client's message in the run. Under secure aggregation nobody else has seen them, so only the
client can make this file, and anyone who reads it learns the client's sums.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.mean import Mean
from fedfm.aggregation.secure import Secure
from fedfm.config.experiment import Experiment
from fedfm.core import storage, tasks
from fedfm.core.checks import conform
from fedfm.core.kept_sums import KeepsSums, sums_of
from fedfm.core.messages import ROUND, Request
from fedfm.errors import ClientFault, InputError
from fedfm.linalg.params import Params
from fedfm.runtime.client import Silos
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.row_sums import AddsRows
from fedfm.runtime.run_directory import Run

OPENED = "opened_sums.json"  # in a run's folder, if sums are hidden: the clients whose own sums were given
LEAST = 2  # least number of clients whose hidden sums may follow from the run's and from those that were given


def method_with_sums(run: Run) -> KeepsSums:
    """The run's method, if its result without a client is a function of the kept sums minus the client's own.

    Raises:
        InputError: the result is no such function; the message says why.
    """
    experiment, method, why = run.experiment, run.experiment.method, ""
    if run.manifest["result"] is None:
        raise InputError(f"{run.path} is not finished; run `fedfm resume {run.path}` first")
    if not isinstance(method, KeepsSums):
        raise InputError(f"{run.path}: the server keeps no sums of {run.experiment.method_name}")
    if experiment.privacy is not None and experiment.privacy.states_epsilon:
        why = "under [privacy] the message had noise, and the sums without noise would be another release"
    elif not experiment.method.traits.independent_messages:
        why = "the class weights depend on the rows of all clients"
    elif isinstance(tasks.task_named(experiment.model.task), AddsRows):
        why = f"the scale of the targets of {experiment.model.task} depends on the rows of all clients"
    elif why_no_sum(experiment):
        why = why_no_sum(experiment)
    elif run.manifest["result"]["rounds"] != 1:
        why = "it has no round"
    if why:
        raise InputError(f"{run.path}: without a client, the sums are not the kept sums minus its own: {why}")
    return method


def why_no_sum(experiment: Experiment) -> str:
    """Why the kept sums are not those over the clients' rows; "" if they are."""
    aggregation = experiment.aggregation
    clipped = isinstance(aggregation, Secure) and aggregation.clip_norm is not None
    if clipped or not isinstance(aggregation, Mean | Secure):
        return "the [aggregation] is not the plain sum of the messages"
    return "" if experiment.attack is None else "some clients changed their messages by [attack]"


def check_in_sum(run: Run, client: str) -> None:
    """Refuse a client whose message is not in the kept sums.

    Raises:
        InputError: it is not a client of the run, or was excluded from the round.
    """
    if client not in run.manifest["clients"]:
        raise InputError(f"{run.path}: {client} is not a client of the run, so its sums are not in the total")
    if client not in in_sum(run):
        raise InputError(f"{run.path}: {client} was excluded from the round, so its sums are not in the total")


def in_sum(run: Run) -> list[str]:
    """The clients whose messages are in the kept sums."""
    gone = {e["client"] for e in run.manifest["result"]["excluded"] if e["part"] == ROUND}
    return [c for c in run.manifest["clients"] if c not in gone]


def is_hidden(run: Run) -> bool:
    """Whether the server has seen sums over several clients only."""
    return run.experiment.aggregation.transport.form != "plain"


def check_others(run: Run, given: Mapping[str, str]) -> None:
    """Refuse files from which, with those given before, the hidden sums of a client that gave none would follow.

    The same client may be given twice. A run that a client has left shares the record of the run that it left.

    Args:
        given: SHA-256 of the sums by client.

    Raises:
        InputError: the sums of one client alone would follow.
    """
    if not is_hidden(run):
        return
    everybody, opened = _record(run)
    silent = sorted(everybody - opened.keys() - given.keys())
    if 0 < len(silent) < LEAST:
        before = sorted(opened.keys() - given.keys())
        also = f", with those given before by {', '.join(before)}," if before else ""
        raise InputError(
            f"{run.path}: the files of {', '.join(sorted(given))}{also} would disclose the sums of {silent[0]}, which "
            "gave none: leave out one more file, or give a file of every client"
        )


def enter_opened(run: Run, given: Mapping[str, str], new: Run | None = None) -> None:
    """Record whose sums were given: in this run, in the run from which it was made, and in the new run.

    Args:
        given: SHA-256 of the sums by client.
        new: the run without a client.
    """
    if not is_hidden(run):
        return
    everybody, opened = _record(run)
    record = {"clients": sorted(everybody), "opened": dict(sorted({**opened, **given}.items()))}
    for place in (_origin(run), run.path, None if new is None else new.path):
        if place is not None and place.is_dir():
            with storage.writing(place / OPENED):
                storage.write_atomic(place / OPENED, json.dumps(record, indent=1).encode())


def _origin(run: Run) -> Path | None:
    """The run that the first client left by its own sums; None if no client did, or it is no longer there."""
    places = [Path(e["from"]["run"]) for e in run.manifest.get("departures", ()) if e["removed"].get("sums_sha256")]
    return places[0] if places and places[0].is_dir() else None


def _record(run: Run) -> tuple[set[str], dict[str, str]]:
    """The clients of the first sum, and the SHA-256 of the sums of those that gave theirs."""
    everybody, opened = set(in_sum(run)), dict[str, str]()
    for place in (run.path, _origin(run)):
        if place is not None and (place / OPENED).is_file():
            try:
                found = json.loads((place / OPENED).read_text(encoding="utf-8"))
                everybody |= set(found["clients"])
                opened |= found["opened"]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f"{place / OPENED}: this record of the clients whose sums are known is damaged: {error}"
                ) from None
    return everybody, opened


def compute(run: Run, client: str, population: Partitioned, memory: Path) -> Params:
    """The sums over a client's training rows.

    Args:
        population: the client's rows and the model.
        memory: an empty folder.
    """
    method, seed = method_with_sums(run), run.experiment.run.seed
    check_in_sum(run, client)
    silos = Silos(run.experiment.method, Aggregator(), population, memory=memory, seed=seed)
    return method.own_sums(silos.client(Request(client, "", {}, 1, 1)), seed)


def write(run: Run, client: str, sums: Params, path: Path) -> None:
    """Write a client's sums into a file that only this user can read."""
    of = {"client": client, "params_sha256": run.manifest["result"]["params_sha256"], "sums": sums}
    storage.save(path, of, 0o600)


def read(run: Run, state: Params, path: Path, client: str | None = None) -> tuple[str, Params]:
    """The client and the sums of a file that :func:`write` made for this run.

    Args:
        state: the server's state, whose sums have the shapes that are expected.
        client: the client whose sums are expected.

    Raises:
        InputError: the file is damaged, or of another run or client.
    """
    found: dict[str, Any] | None = storage.load(path) if path.is_file() else None
    try:
        found = conform(found, dict[str, Any], "file")
        name, of, sums = (found[key] for key in ("client", "params_sha256", "sums"))
        conform(sums, Params, "sums")
        fits = sums.layout.entries == sums_of(state).layout.entries and all(t.isfinite().all() for t in sums.values())
    except (ClientFault, KeyError):
        fits = False
    if not fits:
        raise InputError(f"{path}: no file of a client's sums; `fedfm silo sums silo.toml RUN --out FILE` writes one")
    if of != run.manifest["result"]["params_sha256"]:
        raise InputError(f"{path}: these sums are of another run than {run.path}")
    if client not in (None, name):
        raise InputError(f"{path}: these are the sums of {name}, not of {client}")
    check_in_sum(run, name)
    return name, sums


def subtract(method: KeepsSums, state: Params, sums: Params, whose: str) -> Params:
    """The kept sums minus these sums.

    Raises:
        InputError: no rows could have the difference, so these are not the sums of the client's message.
    """
    rest = Params({name: tensor.clone() for name, tensor in (sums_of(state) - sums).items()})
    if not method.could_be_sums(rest):
        raise InputError(f"no rows have the kept sums minus those of {whose}: these are not the sums that {whose} sent")
    return rest
