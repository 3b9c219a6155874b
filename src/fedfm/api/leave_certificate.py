"""The certificate of a client that left a run: what was removed, what was not, and an attack before and after."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable
from typing import Any

from fedfm.data.table import fingerprint
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run
from fedfm.runtime.run_folder import MANIFEST


def entry(run: Run, name: str, how: str) -> dict[str, Any]:
    """The part of a certificate that names the client and the run that it left."""
    return {
        "client": name,
        "how": how,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "from": {
            "run": str(run.path),
            "params_sha256": run.manifest["result"]["params_sha256"],
            "manifest_sha256": hashlib.sha256((run.path / MANIFEST).read_bytes()).hexdigest(),
        },
        "rows_at": (run.experiment.data.clients or {}).get(name),
    }


def certificate(run: Run, name: str, how: str, population: Partitioned) -> dict[str, Any]:
    """The certificate: what the new run no longer contains of the client, and what remains."""
    result, experiment = run.manifest["result"], run.experiment
    held = population.federated.clients.get(name)
    rows = population.federated.test[:0] if held is None else held.train
    private = experiment.privacy is not None
    removed: dict[str, Any] = {"client": name, "rounds": 0 if held is None else result["rounds"]}
    if not private:  # the number and a hash of the rows would be a release
        removed |= {"rows": len(rows), "rows_sha256": fingerprint(population.federated.table.take(rows))}
    left = list_what_stays(run)
    if private:
        left.append("the privacy that the client's release has spent, which stays spent")
    return entry(run, name, how) | {"removed": removed, "not_removed": left}


def list_what_stays(run: Run) -> list[str]:
    """List the traces of the client that a new run does not remove."""
    experiment = run.experiment
    found = [
        "the old run and every copy of its model, its predictions and its messages",
        "the choice of method, model and hyper-parameters, if anybody looked at results with the client",
        "the frozen weights of the model, which the run did not train",
    ]
    if experiment.aggregation.transport.form != "plain":
        found.append("the client's sum, which secure aggregation hid: it is the difference of both results")
    if experiment.data.clients is None or experiment.data.limit is not None:
        found.append(
            "the client's rows in the source of the data, and in the manifest's hash of it; no client trains on them"
        )
    return found


def membership(
    run: Run, new: Run, name: str, population: Partitioned, notice: Callable[[str], None]
) -> dict[str, Any] | None:
    """How well the old and the new model tell the client's rows from test rows; None if nobody can compare rows."""
    from fedfm.audits.departure import membership_of
    from fedfm.audits.model_membership import final_models
    from fedfm.audits.row_evidence import no_round, unreadable

    why = unreadable(run) or no_round(run)
    if why is None and new.manifest["model"]["classes"] != run.manifest["model"]["classes"]:
        why = f"only {name} had rows of some class, so the two models have other outputs"
    if why is not None:
        notice(f"no attack compares the rows of {name} before and after: {why}")
        return None
    targets = [final_models(of, population) for of in (run, new)]
    scores, how = membership_of(run, population, name, targets, notice)
    if None in scores:
        notice(f"no attack compares the rows of {name} before and after: it has too few, or there are no test rows")
        return None
    both = zip(("before", "after"), (s for s in scores if s is not None), strict=True)
    return {"attack": how} | {key: dict(zip(("auc", "low", "high"), s.interval(0.95), strict=True)) for key, s in both}
