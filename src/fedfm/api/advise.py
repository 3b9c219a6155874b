"""Compare protections by their price: each protection that an experiment could have is an experiment of its own.

Every option is rehearsed on this machine (:mod:`fedfm.api.rehearsal`), which counts its bytes, takes its time, and
shows from the messages who could read what. Its epsilon is the accountant's for all rounds. Encrypted rows are not
rehearsed, since they would take as long as the run: the plan of ``fedfm check`` has their costs, and only the rounds
that follow are rehearsed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from fedfm.api.command_registry import action
from fedfm.api.measured_accuracy import find_accuracy
from fedfm.api.protections import PROTECTIONS, PrivacyTarget, Protection, Tables, without_protection
from fedfm.api.rehearsal import Rehearsal, counts_of, rehearse
from fedfm.config.cohorts import enough
from fedfm.config.experiment import Experiment
from fedfm.config.paths import KEYS
from fedfm.config.replaced import without_former_keys
from fedfm.config.toml import read, to_toml
from fedfm.core import new_folders, storage
from fedfm.core.capabilities import HiddenModel, Planned
from fedfm.core.overrides import refuse_doubles
from fedfm.core.toml_text import put
from fedfm.errors import FedfmError, InputError
from fedfm.linalg.params import Params
from fedfm.models.locate import BUILT_IN
from fedfm.reports.read import sequence
from fedfm.reports.readers import readers
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.population import populate
from fedfm.runtime.progress import Progress
from fedfm.runtime.progress_bar import Bar
from fedfm.runtime.result import spending
from fedfm.runtime.run_manifest import of_delta, of_privacy

SECONDS = 5.0  # for the rehearsal of an option
_TAKES = "`fedfm advise exp.toml` takes an experiment in TOML"
_PLANNED = "operations counted, and each kind of operation timed here on one core; the rounds "


def advise(
    experiment: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    clip_norm: float | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Set out the protections that an experiment could have, with the price of each.

    Args:
        experiment: a TOML file, or nested tables.
        out: a folder; each option is written there as ``<name>.toml``.
        changes: values by key, as ``{"method.rounds": 5}``.
        epsilon, delta, clip_norm: for the options with noise [those of the experiment, else 8, 1e-5 and 1].
        seconds: about how long the rehearsal of an option may take.
        progress: receives notices; by default they go to stderr.

    Returns:
        ``options``: for each ``name``, ``what``, ``seconds``, ``bytes`` (``bytes_up`` and ``bytes_down``), ``at_least``
        (whether the bytes are a lower bound), ``epsilon``, ``delta``, ``unit``, ``rounds``, ``basis`` (what was
        measured and what computed), ``readable`` (party -> what it can read), ``accuracy`` (where this project measured
        it, else None), ``notes``, ``set`` (keys for ``fedfm run --set``; None if a file is needed) and ``file``.
        ``refused``: ``name``, ``what`` and ``reason`` of the others.

    Raises:
        InputError: the experiment is not valid, or its rows or model are not on this machine.
        RunError: its clients fail.
    """
    progress, changes = progress or Bar(), changes or {}
    target = {
        "target_epsilon": ("--epsilon", epsilon),
        "delta": ("--delta", delta),
        "clip_norm": ("--clip-norm", clip_norm),
    }
    refuse_doubles(changes, {f"privacy.{key}": option for key, option in target.items()})
    given = _tables_of(experiment, changes)
    asked = Experiment.from_dict(given, imports=True)
    _check(asked)
    privacy = asked.privacy
    _check_target(epsilon, delta, clip_norm)
    if not 0 < seconds < math.inf:
        raise InputError(f"--seconds {seconds:g}: expected a number above 0, and finite")
    spend = PrivacyTarget(
        epsilon or (privacy and privacy.target_epsilon) or 8.0,
        delta or (privacy and privacy.delta) or 1e-5,
        clip_norm or (privacy and privacy.clip_norm) or 1.0,
    )
    base = without_protection(given)
    plain = Experiment.from_dict(base, imports=True)
    options: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    seen: list[Tables] = []
    progress.notice(f"rehearsing up to {len(PROTECTIONS)} protections, about {seconds:g} s each after loading")
    with contextlib.ExitStack() as stack:
        half = None if out is None else stack.enter_context(new_folders.fill(Path(out), "writing options"))
        for protection in PROTECTIONS:
            about = {"name": protection.name, "what": protection.what}
            try:
                tables = protection.change(base, plain, spend)
                tables = tables | {"name": f"{asked.name}-{protection.name.replace('_', '-')}"}
                made = Experiment.from_dict(tables, imports=True)
                if (like := dataclasses.replace(made, name=asked.name).to_dict()) in seen:
                    continue
                seen.append(like)
                option = about | _price(protection, made, seconds, progress)
            except FedfmError as error:
                if protection is PROTECTIONS[0]:  # the experiment itself is impossible, whatever the option
                    raise
                refused.append(about | {"reason": str(error)})
                continue
            source = experiment if isinstance(experiment, str | Path) else None
            option["set"] = None if source is None else _as_changes(Path(source), changes, given, tables, made)
            option["file"] = None if half is None else _write(half, protection.name, tables)
            options.append(option)
    return {"options": options, "refused": refused, "delta": spend.delta, "epsilon": spend.epsilon}


def _tables_of(experiment: str | Path | Mapping[str, Any], changes: Mapping[str, Any]) -> Tables:
    """The user's tables, with absolute paths, so that a file in another folder means the same."""
    if isinstance(experiment, Mapping):
        Experiment.from_dict(experiment, imports=True)
        tables: Tables = {
            key: dict(value) if isinstance(value, Mapping) else value for key, value in experiment.items()
        }
        for key, value in changes.items():
            put(tables, key, value)
    else:
        Experiment.load(experiment, changes, tell=lambda text: None)  # its error lists all faults of the file
        tables, former = read(experiment, changes, _TAKES), read(experiment, {}, _TAKES)["method"]
        if "method.name" in changes:
            tables = without_former_keys(tables, former, changes, lambda text: None)
    for section, keys in KEYS.items():
        table: Tables = tables.get(section, {})
        table |= {key: _absolute(table[key]) for key in keys if key in table}
    data: Tables = tables["data"]
    if isinstance(data.get("clients"), Mapping):
        data["clients"] = {name: _absolute(path) for name, path in data["clients"].items()}
    return tables


def _absolute(value: Any) -> Any:
    """An existing file or folder as an absolute path; any other value unchanged."""
    if not isinstance(value, str) or value in BUILT_IN or value in ("", "features"):
        return value
    path = Path(value).expanduser()
    return str(path.resolve()) if path.exists() else value


def _check(experiment: Experiment) -> None:
    """Refuse an experiment that cannot be rehearsed here.

    Raises:
        InputError: rows or model are elsewhere, or nothing would be compared.
    """
    if experiment.in_memory or experiment.own_code:
        raise InputError("data.name: advise reads rows and model from files, not from a function", key="data.name")
    if isinstance(experiment.method, HiddenModel):
        raise InputError(
            f'method.name = "{experiment.method_name}": advise starts from a method whose clients have the model, such '
            "as fedavg, and adds this one as an option; `fedfm check` has its costs",
            key="method.name",
        )
    if experiment.method.needs.pooled:
        raise InputError(
            f'method.name = "{experiment.method_name}" pools all rows, so nothing is left to protect; expected a '
            "federated method",
            key="method.name",
        )
    for key, value in (("data.classes", experiment.data.classes), ("run.superlink", experiment.run.superlink)):
        if value is not None:
            raise InputError(
                f"{key}: the silos have the rows, and a rehearsal needs rows on this machine; drop it and name rows "
                "like theirs in [data]",
                key=key,
            )


def _check_target(epsilon: float | None, delta: float | None, clip_norm: float | None) -> None:
    """Refuse values that no option with noise can have; None leaves the experiment's value or the default."""
    for name, value, most in (
        ("epsilon", epsilon, math.inf),
        ("delta", delta, 1.0),
        ("clip-norm", clip_norm, math.inf),
    ):
        if value is not None and not 0 < value < most:
            bounds = "in (0, 1)" if most == 1.0 else "above 0, and finite"
            raise InputError(f"--{name} {value:g}: expected a number {bounds}")


def _price(protection: Protection, made: Experiment, seconds: float, progress: Progress) -> dict[str, Any]:
    """The price of an option.

    Raises:
        FedfmError: the option cannot be run with these rows and this model.
    """
    progress.notice(f"{protection.name}: {protection.what}")
    population = populate(made)
    enough(made, population.clients)
    found = _plan_price(made, population, seconds) if isinstance(made.method, HiddenModel) else None
    found = found or _rehearsal_price(made, population, seconds)
    sizes = list(population.sizes().values())
    spent = spending(made, sizes)
    privacy = made.privacy
    states = spent.epsilon is not None and privacy is not None
    found |= {
        "epsilon": spent.epsilon,
        "delta": privacy.delta if states and privacy is not None else None,
        "unit": privacy.unit if states and privacy is not None else None,
        "rounds": made.method.rounds,
        "accuracy": find_accuracy(protection.name, made, population),
    }
    warnings = found.pop("warnings", [])
    found["notes"] = [*of_delta(made, population), *of_privacy(made, spent, len(population.clients)), *warnings]
    return found


def _rehearsal_price(made: Experiment, population: Partitioned, seconds: float) -> dict[str, Any]:
    found = rehearse(made, population, seconds)
    halves = (getattr(made.method, name) for name in (*made.method.means, *made.method.asks))
    weights = any(Params in get_type_hints(half).values() for half in halves)
    whole = found.rows == found.all_rows and found.rounds == found.all_rounds  # few rows may cause warnings
    warnings = [str(text) for text in sequence(found.run.result.get("warnings"))] if whole else []
    costs = _costs(found, found.seconds) | {"basis": found.basis, "warnings": warnings}
    return costs | {"readable": dict(readers(found.run, weights))}


def _costs(found: Rehearsal, seconds: float) -> dict[str, Any]:
    up, down = found.bytes_up, found.bytes_down
    return {
        "seconds": round(seconds, 3),
        "bytes": up + down,
        "bytes_up": up,
        "bytes_down": down,
        "at_least": found.at_least,
    }


def _plan_price(made: Experiment, population: Partitioned, seconds: float) -> dict[str, Any] | None:
    """The price of a run on encrypted rows: the costs of the plan, and of the rounds after it."""
    method = made.method
    plan = method.plan(population.model, counts_of(population)) if isinstance(method, Planned) else None
    if plan is None:
        return None
    # The rounds are the same without ciphertexts: a simulation, which takes no [privacy].
    clear = {key: value for key, value in made.to_dict().items() if key not in ("privacy", "aggregation")}
    clear["method"] = clear["method"] | {"encryption": "clear"}
    rounds = rehearse(Experiment.from_dict(clear, imports=True), population, seconds)
    costs = plan.to_dict()
    rows = costs["bytes_per_batch"] * costs["batches"] + costs["key_bytes"] * len(population.clients)
    return {
        "seconds": round(costs["seconds"] + rounds.seconds, 3),
        "bytes": rows + rounds.of_rounds,
        "bytes_up": None,
        "bytes_down": None,
        "at_least": False,
        "basis": f"{_PLANNED}{rounds.basis}, in the clear",
        "readable": dict(action("advise", "readers")()) | {"holders of the model": "what adapters and head remember"},
        "plan": costs,
    }


def _as_changes(
    path: Path, changes: Mapping[str, Any], given: Tables, tables: Tables, made: Experiment
) -> dict[str, Any] | None:
    """The option as values by key for ``fedfm run PATH --set``; None if these keys do not make the same experiment."""
    found = dict(changes)
    for section in ("model", "method", "privacy"):
        before, after = given.get(section, {}), tables.get(section, {})
        other = section == "method" and before.get("name") != after.get("name")
        found |= {f"{section}.{k}": v for k, v in after.items() if other or before.get(k) != v}
    try:
        same = Experiment.from_dict(_tables_of(path, found), imports=True)
    except InputError:
        return None
    return found if dataclasses.replace(same, name=made.name).to_dict() == made.to_dict() else None


def _write(half: Path, name: str, tables: Tables) -> str:
    """Write an option's file, and return the path to which it will be moved."""
    path = half / f"{name}.toml"
    storage.write_atomic(path, to_toml(tables).encode(), of_run=False)
    return str(new_folders.place_of(half) / path.name)
