"""Survey: what the silos of an experiment hold, before anybody trains.

The survey is a run of the method ``survey`` on the experiment's rows, model, engine and protection. This module makes
its experiment from the user's own, and writes the figures of the finished run as ``survey.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.api import survey_figures
from fedfm.api.execute import drive
from fedfm.api.survey_figures import FILE
from fedfm.config.experiment import Experiment
from fedfm.config.registry import resolve
from fedfm.config.replaced import without_former_keys
from fedfm.config.toml import read
from fedfm.core.capabilities import HiddenModel
from fedfm.core.overrides import refuse_doubles
from fedfm.core.toml_text import copy_tables, put
from fedfm.errors import InputError, reason_of
from fedfm.runtime.progress import Progress
from fedfm.runtime.progress_bar import Bar
from fedfm.runtime.run_directory import Run

_NAME = "survey"
_TAKES = "`fedfm survey exp.toml` takes an experiment in TOML"
# Keys of [run] and [data] on training and scores; a survey has neither.
_NO_USE = {
    "run": (
        *("patience", "local_scores", "asynchronous", "target_accuracy", "transport"),
        *("evaluate_fraction", "evaluate_every"),
    ),
    "data": ("augment",),
}


def survey(
    experiment: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    changes: Mapping[str, Any] | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    reference: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Ask the silos of an experiment once for sums over their training rows; nothing is trained.

    Args:
        experiment: a TOML file, or nested tables. Its [method] and [attack] are left out.
        out: the run directory; by default ``runs/<name>-<time>``.
        changes: values by key, as ``{"method.min_count": 20}``.
        epsilon, delta: noise for single rows [those of [privacy], else no noise; 1e-5].
        reference: a ``survey.json`` of other rows by the same model, such as those on which the model was trained; by
            default that in the model's folder, if there is one.
        progress: receives notices; by default they go to stderr.

    Returns:
        ``run``, ``epsilon``, ``delta``, ``readable`` (party -> what it can read) and the figures: ``silos``, ``rows``,
        ``counts`` (for each property ``groups``, ``counts``, ``between``, ``adjusted``), ``features``, ``by_silo``,
        ``risks`` (for each ``risk``, ``figure``, ``value``, ``rule``, ``advice``). ``survey.json`` in the run directory
        has them, too.

    Raises:
        InputError: the experiment is not valid, has no [model], or protects clients while no epsilon is given.
        RunError: too few silos answer, or no rows can have their sums.
    """
    progress = progress or Bar()
    made = _experiment_of(experiment, changes or {}, epsilon, delta, progress)
    before = _read_reference(reference, made)
    run = Run.create(made, None if out is None else Path(out))
    drive(run, progress, fresh=True)
    return survey_figures.finish(run.path, before, progress)


def _experiment_of(
    experiment: str | Path | Mapping[str, Any],
    changes: Mapping[str, Any],
    epsilon: float | None,
    delta: float | None,
    progress: Progress,
) -> Experiment:
    """The survey's experiment."""
    doubled = {"privacy.target_epsilon": ("--epsilon", epsilon), "privacy.delta": ("--delta", delta)}
    refuse_doubles(changes, doubled | {"privacy.noise_multiplier": ("--epsilon", epsilon)})
    given = {"method.name": _NAME, **changes}
    if isinstance(experiment, Mapping):
        tables = copy_tables(experiment)
        former = experiment.get("method", {})
        for key, value in given.items():
            put(tables, key, value)
    else:
        tables, former = read(experiment, given, _TAKES), read(experiment, {}, _TAKES).get("method", {})
    if "model" not in tables:
        name = former.get("name") if isinstance(former, Mapping) else None
        hidden = isinstance(name, str) and issubclass(resolve("methods", name), HiddenModel)
        why = f'method.name = "{name}" keeps the model at the server' if hidden else "[model] is missing"
        raise InputError(
            f"{why}: a survey needs a model whose features the silos compute; name one, e.g. --set model.name=nano-vit",
            key="model.name",
        )
    if isinstance(former, Mapping) and former.get("name") != _NAME:
        tables["method"] = {"name": _NAME} | {
            key.partition(".")[2]: value for key, value in changes.items() if key.startswith("method.")
        }
    elif isinstance(former, Mapping):
        tables = without_former_keys(tables, former, given, progress.notice)
    if "name" in tables:
        tables["name"] = f"{tables['name']}-survey"
    _leave_out(tables, progress)
    _protect(tables, epsilon, delta)
    if "privacy" not in tables and "aggregation" not in tables:
        tables["method"].setdefault("by_silo", True)
    return Experiment.from_dict(tables, imports=True)


def _leave_out(tables: dict[str, Any], progress: Progress) -> None:
    """Leave out what only training and scores need, with a notice."""
    gone = ["[attack]"] if tables.pop("attack", None) is not None else []
    aggregation = tables.get("aggregation", {}).get("name", "mean")
    if aggregation != "secure" and tables.pop("aggregation", None) is not None and aggregation != "mean":
        gone.append(f'aggregation.name = "{aggregation}", since a robust rule makes no sums')
    for section, keys in _NO_USE.items():
        gone += [f"{section}.{key}" for key in keys if tables.get(section, {}).pop(key, None) is not None]
    if gone:
        progress.notice(f"a survey trains and scores nothing; left out: {', '.join(gone)}")


def _protect(tables: dict[str, Any], epsilon: float | None, delta: float | None) -> None:
    """Set [privacy] to the noise that is asked for, or to that of the experiment; secure aggregation stays.

    Raises:
        InputError: the experiment states an epsilon that is not one of records.
    """
    privacy = tables.pop("privacy", {})
    hidden = privacy.get("aggregator") == "secagg" or tables.get("aggregation", {}).get("name") == "secure"
    states = any(key in privacy for key in ("unit", "target_epsilon", "noise_multiplier"))
    if epsilon is None and states:
        if privacy.get("unit") != "record" or "target_epsilon" not in privacy:
            raise InputError(
                "privacy: a survey's noise covers single records and is chosen by an epsilon; the experiment has "
                "another guarantee: give --epsilon, an epsilon for records",
                key="privacy.unit",
            )
        epsilon = privacy["target_epsilon"]
    if epsilon is None and delta is not None:
        raise InputError(f"--delta {delta:g}: no noise is asked for; give --epsilon, too", key="privacy.target_epsilon")
    table: dict[str, Any] = {"aggregator": "secagg"} if privacy.get("aggregator") == "secagg" else {}
    if epsilon is not None:
        mechanism = "distributed_gaussian" if hidden else "gaussian"
        noise = {"mechanism": mechanism, "unit": "record", "target_epsilon": epsilon}
        table |= noise | {"delta": privacy.get("delta", 1e-5) if delta is None else delta}
    if table:
        tables["privacy"] = table


def _read_reference(path: str | Path | None, made: Experiment) -> dict[str, Any] | None:
    """The figures of other rows, from a file, or from the model's folder.

    Raises:
        InputError: the file is not a survey with features.
    """
    if path is None:
        path = Path(made.model.name).expanduser() / FILE
        if not path.is_file():
            return None
    wanted = f"expected a {FILE} that `fedfm survey` wrote, with features"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        features = {
            "mean": [float(v) for v in found["features"]["mean"]],
            "variance": float(found["features"]["variance"]),
        }
        fingerprint = str(found["model"]["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--reference {path}: {reason_of(error)}; {wanted}") from None
    return {"path": str(path), "features": features, "fingerprint": fingerprint}
