"""What a run directory states about the rows: fingerprint, counts and notices, in the manifest or the private folder.

An epsilon bounds what a release discloses about one row. A published hash of the rows, or their exact numbers by client
and class, would tell two candidate data sets apart at any epsilon. So a run with [privacy] computes the hash with a
secret key, and writes the counts and the notices about the rows into ``private/data.json``.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedfm.core import storage
from fedfm.core.text import from_json, to_json
from fedfm.data.table import FederatedData, Table, fingerprint
from fedfm.errors import InputError
from fedfm.runtime.client_memory import secret, secret_file
from fedfm.runtime.sharing import FILE

if TYPE_CHECKING:
    from fedfm.models.model import Model
    from fedfm.runtime.run_directory import Run

_KEY = ("data", "fingerprint")  # party and name of the secret under private/
_WORDS = {"preparation": "tokenizer or image processor of the model"}
_PUBLIC = ("kind", "source", "classes")  # keys of a split whose values do not depend on single rows
JOINED = (
    "clients/ holds the model of each client that joined after training. It is fitted to that client's rows and "
    "discloses them in part, and no epsilon of the run covers it."
)
_ALWAYS = (
    "The frozen weights of the model were not trained on the rows.",
    "Names of clients and classes, test rows, durations, failures and the verdicts of audits are public.",
    "No other run uses the same rows: the epsilons of several runs add up.",
)
_BY_UNIT = {
    "record": (
        "Each person has one row, at one client; a person with several rows, or at several clients, spends more.",
        "A row is a training row as the run has it: data.limit, data.test_fraction and data.val_fraction draw from all "
        "rows of a table, so one row more in it changes which others train. For a row of the table, mark test rows by "
        "data.split.",
    ),
    "client": ("Each person's rows are at one client; a person at several clients spends more.",),
}


def guarantee(ledger: Mapping[str, Any], privacy: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the differential privacy that a run's ledger states; None if it states none.

    Args:
        privacy: the experiment's table [privacy].

    Returns:
        ``epsilon`` (None if infinite), ``delta``, ``unit``, ``relation``, ``mechanism``, ``composition``,
        ``notes`` of the releases, and ``assumptions``: the conditions under which the epsilon holds.
    """
    listed = ledger.get("entries")
    entries = [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []
    spent = [e for e in entries if "mechanism" in e]
    if not spent and ledger.get("epsilon") is None:
        return None

    def values_of(key: str) -> list[str]:
        return list(dict.fromkeys(str(e[key]) for e in spent if e.get(key)))

    asked = privacy or {}
    unit = " and ".join(values_of("unit")) or str(asked.get("unit") or "")
    deltas = [e["delta"] for e in spent if isinstance(e.get("delta"), float | int)]
    assumptions = [*_BY_UNIT.get(unit, ()), *_ALWAYS]
    if trials := len([e for e in entries if e.get("what") == "tuning"]):
        assumptions.append(f"The {trials} runs that chose the learning rate are not included in this epsilon.")
    found = {"epsilon": ledger.get("epsilon"), "delta": max(deltas, default=asked.get("delta")), "unit": unit or None}
    found |= {key: " and ".join(values_of(key)) or None for key in ("relation", "mechanism", "composition")}
    return found | {"notes": values_of("note"), "assumptions": assumptions}


def fingerprints(run: Run, table: Table, model: Model) -> dict[str, str]:
    """Return fingerprints of rows, model and preprocessing for the manifest, 64 hex digits each.

    Under [privacy] the fingerprint of the rows is an HMAC-SHA-256 of their SHA-256, with a key drawn once per run.

    Raises:
        InputError: the run began with such a key, but the key is missing.
    """
    data = fingerprint(table)
    if run.experiment.privacy is not None:
        private, began = run.path / "private", run.manifest["fingerprints"]
        if began and not (path := secret_file(private, *_KEY)).is_file():
            if str(path.relative_to(run.path)) not in {mark["file"] for mark in run.manifest.get("lost", ())}:
                raise InputError(
                    f"{path} is missing: it is the key for the fingerprint of the data. Without it nobody can check "
                    "whether these are the data with which this run began; put the file back"
                )
            began.pop("data", None)  # the run continues without the key, and the manifest records that
        data = hmac.new(secret(private, *_KEY), data.encode(), hashlib.sha256).hexdigest()
    return {"data": data, **model.fingerprints}


def check_partition(run: Run, federated: FederatedData) -> str | None:
    """Refuse a resumed run whose clients would have other rows, e.g. because the column with their names has changed.

    Returns:
        SHA-256 (64 hex digits) of the assignment of rows to clients, for :func:`tell`; None without clients. The
        fingerprint of the rows does not cover this assignment.

    Raises:
        InputError: a client would have other rows.
    """
    if not federated.clients:
        return None
    digest = hashlib.sha256()
    for name, rows in sorted(federated.clients.items()):
        for part in (rows.train, rows.val, rows.test):
            digest.update(f"{name!r} {len(part)} ".encode() + part.astype("<i8").tobytes())
    now = digest.hexdigest()
    if run.experiment.privacy is None:
        began = run.manifest["fingerprints"].get("partition")
    else:
        began = _private(run).get("partition")
    if began not in (None, now):
        raise InputError(
            f"{run.path}: the partition changed since this run began, so clients would have other rows: a resumed run "
            "needs the same column, or the same version of the library, by which the rows were partitioned"
        )
    return now


def _private(run: Run) -> dict[str, Any]:
    """Read the content of :data:`FILE`; empty if the file is absent or damaged."""
    try:
        found = from_json((run.path / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_same(run: Run, now: Mapping[str, str], why: str) -> None:
    """Compare fingerprints with those at the start of the run; a fingerprint whose key is lost is not compared.

    Args:
        why: reason why the run needs the same rows and model; the message ends with this text.

    Raises:
        InputError: a fingerprint differs.
    """
    began = run.manifest["fingerprints"]
    for name, value in now.items():
        if name in began and began[name] != value:
            raise InputError(f"{run.path}: the {_WORDS.get(name, name)} changed since this run began: {why}")


def tell(
    run: Run,
    split: Mapping[str, Any] | None,
    notices: Sequence[str],
    profile: Mapping[str, Any] | None = None,
    partition: str | None = None,
) -> None:
    """Write facts about the rows into the manifest or ``private/``.

    Args:
        split: numbers of rows by client and class; None if the server does not know the rows.
        notices: the notices about the rows.
        profile: coarse properties of the rows (:mod:`fedfm.data.profiles`); empty or None if they are unknown.
        partition: the result of :func:`check_partition`.
    """
    if run.experiment.privacy is None:
        others = [n for n in run.manifest["notices"] if n not in notices]
        run.manifest |= {"split": split, "notices": [*others, *notices]} | ({"profile": profile} if profile else {})
        if partition:
            run.manifest["fingerprints"]["partition"] = partition
        return
    run.manifest["split"] = None if split is None else {key: split[key] for key in _PUBLIC} | {"counts": FILE}
    known = {"profile": profile, "partition": partition}
    kept = {"split": split, "notices": list(notices)} | {key: value for key, value in known.items() if value}
    text = to_json(kept, indent=1, ascii=True)
    storage.write_atomic(run.path / FILE, text.encode() + b"\n", 0o600)


def private_notices(run: Run) -> list[str]:
    """Read the notices about the rows of a run with [privacy]; empty if their file is absent or damaged."""
    try:
        return list(map(str, from_json((run.path / FILE).read_text(encoding="utf-8"))["notices"]))
    except (OSError, ValueError, KeyError, TypeError):
        return []


def profile_of(run: Run) -> dict[str, Any]:
    """Read the coarse properties of the run's rows; empty if they are not known."""
    found = (run.manifest if run.experiment.privacy is None else _private(run)).get("profile")
    return found if isinstance(found, dict) else {}


def rows_of(run: Run) -> list[int] | None:
    """Read the clients' numbers of training rows; of very many clients, each number once.

    Returns:
        None if the server does not know the numbers, or if their file is missing.
    """
    try:
        split = run.manifest["split"]
        if split is not None and split.get("counts") == FILE:
            split = from_json((run.path / FILE).read_text(encoding="utf-8"))["split"]
        if split is not None and "sums" in split:
            return [int(n) for n in split["sums"]["train"]["sizes"]]
        return None if split is None else [int(c["train"]["rows"]) for c in split["clients"].values()]
    except (OSError, ValueError, KeyError, TypeError):
        return None
