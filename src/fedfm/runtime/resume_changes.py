"""Changes that a resumed run allows: its number of rounds, and the places of files and parties.

The run continues after its last round. Its results have the same bits as if it had begun with the changed settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.config.toml import put
from fedfm.core.text import from_json
from fedfm.core.toml_text import leaves
from fedfm.errors import InputError
from fedfm.runtime.run_directory import Run
from fedfm.runtime.run_folder import MANIFEST, settings_of_rounds, versions
from fedfm.training import Local, TrainsLocally

# Keys for places and waiting times; fingerprints ensure that data and model stay the same when their places change.
MOVABLE = (
    "data.path",
    "model.name",
    "run.extend_timeout",
    "run.folder",
    "run.identity",
    "run.loader_workers",
    "run.ray_address",
    "run.root_certificates",
    "run.roster",
    "run.superlink",
    "run.timeout",
    "run.track",
    "run.workers",
)


def changed_keys(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The dotted keys with other values in two experiments' tables, except those of :data:`MOVABLE`."""
    old, new = ({".".join(keys): value for keys, value in leaves(tables)} for tables in (before, now))
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in MOVABLE)


def check_edits(run: Run, record: Mapping[str, Any], *, finished: bool = False) -> None:
    """Refuse a manifest in which somebody has changed the experiment since a checkpoint.

    Args:
        finished: of a finished run, where it ran and who left later do not count: an audit judges the latter.

    Raises:
        InputError: the message names the keys.
    """
    if "experiment" not in record:  # an earlier version wrote the checkpoint
        return
    before, now = from_json(record["experiment"]), settings_of_rounds(run.manifest["experiment"])
    if "data" not in before:  # an earlier version wrote the checkpoint
        del now["data"]
    keys = [key for key in changed_keys(before, now) if key != "method.rounds"]
    if finished:
        later = {".".join(key): value for key, value in leaves(run.experiment.to_dict())}  # a key of a later version
        present = {".".join(key) for key, _ in leaves(now)}
        old = {".".join(key): value for key, value in leaves(before)}
        keys = [key for key in keys if key != "data.without" and (key == "run.seed" or not key.startswith("run."))]
        keys = [key for key in keys if key in present or old.get(key) != later.get(key)]
    if keys:
        raise InputError(
            f"{run.path / MANIFEST} was changed: {', '.join(keys)} had another value in round {record['round']}. A "
            "run keeps its experiment: put the old value back, or the run's own checkpoint, or start a new run"
        )


def note_versions(run: Run) -> None:
    """Note in the manifest which libraries that affect the bits of the result have other versions than before."""
    before, now = run.manifest.get("versions", {}), versions()
    if other := [
        f"{name} {before[name]} -> {now[name]}" for name in before.keys() & now.keys() if before[name] != now[name]
    ]:
        run.note(f"the run continued with other versions, so its last bits may differ: {', '.join(sorted(other))}")


def move(run: Run, changes: Mapping[str, Any]) -> None:
    """Change keys of :data:`MOVABLE` for the rest of the run. The caller must have locked the run.

    Args:
        changes: new values by dotted key, ``a.b``.

    Raises:
        InputError: the run is finished, a key is not movable, or a value is invalid.
    """
    table = run.experiment.to_dict()
    for key in changes:
        if key not in MOVABLE:
            raise InputError(
                f"--set {key}: a resumed run keeps its experiment; only these keys may change: {', '.join(MOVABLE)}"
            )
    for part in (table, run.manifest["experiment"]):
        for key, value in changes.items():
            put(part, key, value)
    Experiment.from_dict(table, imports=True)
    if run.manifest["result"] is not None:
        raise InputError(f"--set: {run.path} is finished, so a changed setting would have no effect")
    run.write_manifest()
    run.reload()


def extend(run: Run, rounds: int) -> None:
    """Set the run's number of rounds. The caller must have locked the run. A finished run becomes unfinished.

    Raises:
        InputError: the method fixes the number, the run has that many rounds already, or earlier rounds depended on
            the old number.
    """
    experiment, where = run.experiment, f"--rounds {rounds}"
    method, name = experiment.method, experiment.method_name
    done = max((line["round"] for line in run.metrics()), default=0)
    table = experiment.to_dict()
    if not method.rounds:
        raise InputError(f"{where}: {name} has a fixed number of rounds")
    table["method"]["rounds"] = rounds
    Experiment.from_dict(table, imports=True)  # raises an error for several rounds of a method that has one round
    if rounds < done or (rounds == done and run.manifest["result"] is not None):
        raise InputError(f"{where}: {run.path} has {done} rounds already; expected more")
    if experiment.privacy is not None:
        raise InputError(
            f"{where}: the noise of {run.path} was chosen for {method.rounds} rounds; more rounds would exceed the "
            "run's epsilon"
        )
    if method.traits.last_round_differs and done >= method.rounds:
        raise InputError(
            f"{where}: the last round of {name} completed the model. In a run of {rounds} rounds, that round would "
            "have trained the model; start a new run"
        )
    optimiser = method.local if isinstance(method, TrainsLocally) else None
    if isinstance(optimiser, Local) and (optimiser.schedule != "constant" or optimiser.warmup):
        raise InputError(
            f"{where}: method.local.schedule and warmup set the learning rate by the completed share of the "
            f"{method.rounds} planned rounds; start a new run"
        )
    if run.manifest["result"] is not None and run.manifest["result"]["rounds"] < method.rounds:
        raise InputError(f"{where}: {run.path} ended early, after {done} of {method.rounds} rounds (run.patience)")
    if run.manifest["result"] is not None:
        run.manifest["notices"].append(f"the run ended after {done} rounds, and was continued to round {rounds}")
        run.manifest.pop("audits", None)  # the run's final parameters will differ from the audited ones
    run.manifest |= {"result": None, "finished": None}
    run.manifest["experiment"]["method"]["rounds"] = rounds
    run.write_manifest()
    run.reload()
