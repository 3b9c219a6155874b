"""``fedfm check``: print an experiment with all defaults, its rows and model, and the cost of a run."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.api.terminal import say
from fedfm.cli.running import experiment_of
from fedfm.core.transcript import MANY
from fedfm.errors import InputError

if TYPE_CHECKING:
    from fedfm.config.experiment import Experiment
    from fedfm.runtime.cost_estimate import Forecast
    from fedfm.runtime.partitioned import Partitioned

_SHOWN = 12  # largest number of clients that are named
_SAMPLE = 40  # about the number of clients that JSON lists if there are very many


def check(args: Namespace) -> int:
    """Run ``fedfm check``; return the exit code."""
    experiment = experiment_of(args)
    from fedfm.config.toml import to_toml
    from fedfm.data.load import check_files
    from fedfm.engines.known_clients import check_known
    from fedfm.runtime.trackers.tracker import open_tracker
    from fedfm.runtime.who_scores import scoring_notices

    check_files(experiment.data)
    for name in experiment.run.track:
        open_tracker(name)  # raises an error if the library is missing
    check_known(experiment)
    cluster: list[str] = []
    if experiment.run.ray_address is not None:
        from fedfm.engines.flower.simulation import describe_cluster

        cluster = describe_cluster(experiment)  # raises an error before rows and model are read
    result: dict[str, Any] = {"valid": True, "experiment": experiment.to_dict()}
    text = to_toml(experiment.to_display()).rstrip()
    population = None
    # With a SuperLink, data and model are on its machine. That is this machine if the kit's folder exists here.
    if not experiment.run.superlink or Path(experiment.run.superlink).is_dir():
        population, found, more = _look(experiment, cluster)
        result |= found
        text += more
    elif experiment.data.classes is not None:  # the server has no rows, but knows the classes
        result["notices"] = scoring_notices(experiment, 0)
        text += "".join(f"\n\n# {line}" for line in result["notices"])
    if args.matching:
        result["matching"], more = _match(experiment, population)
        text += more
    return say(args, result, text)


def _look(experiment: Experiment, cluster: Sequence[str]) -> tuple[Partitioned, dict[str, Any], str]:
    """Read rows and model; return them, what the result says of them, and the same as lines of text."""
    from fedfm.config.cohorts import enough
    from fedfm.config.user_code import is_function
    from fedfm.core.capabilities import HiddenModel, Planned, ServerModel
    from fedfm.models.locate import locate
    from fedfm.runtime.who_scores import scoring_notices, test_rows

    if isinstance(experiment.method, HiddenModel):
        experiment.method.check_model()
    elif experiment.model.name != "features" and not is_function(experiment.model.name):
        locate(experiment.model.name)
    if isinstance(experiment.method, ServerModel):
        experiment.method.check_foundation()
    from fedfm.runtime import beforehand
    from fedfm.runtime.cost_estimate import forecast
    from fedfm.runtime.population import populate
    from fedfm.runtime.result import spending
    from fedfm.runtime.run_manifest import fits, of_arrival, of_delta, of_method, of_model, of_privacy, of_rows

    population = populate(experiment)
    if population.clients:
        enough(experiment, population.clients)
    fits(experiment, population.model)
    looked = beforehand.check(experiment.method, population)
    sizes = list(population.sizes().values()) if population.clients else None  # None if the silos have the rows
    classes = list(population.federated.table.classes)
    trainable = sum(population.model.layout.sizes.values())
    expected = forecast(experiment, population) if population.clients else None
    result: dict[str, Any] = {"clients": list(population.clients), "classes": classes, "trainable": trainable}
    result["fingerprint"] = population.model.fingerprint
    result["notices"] = [
        *cluster,
        *of_rows(experiment.method, population),
        *of_method(experiment.method, {} if expected is None else expected.by_class),
        *of_arrival(experiment, len(population.clients)),
        *of_model(experiment.run, population.model),
        *looked,
        *of_delta(experiment, population),
        *of_privacy(experiment, spending(experiment, sizes), len(population.clients)),
        *scoring_notices(experiment, *test_rows(experiment, population.federated)),
    ]
    if expected is not None:
        result["forecast"] = {**vars(expected)}  # no copy of the lists of all clients
        if len(expected.rows) > MANY:
            from fedfm.core.name_ranges import shorten

            result["clients"], names = shorten(expected.rows), list(expected.rows)[:: len(expected.rows) // _SAMPLE]
            sample = {
                "rows": {name: expected.rows[name] for name in names},
                "counts": {name: expected.counts[name] for name in names if name in expected.counts},
            }
            result["forecast"] |= {"sample": len(names), **sample}
    lines = [
        f"classes = {json.dumps(classes, ensure_ascii=False)}",
        f'model.fingerprint = "{population.model.fingerprint}"',
        *_estimate_lines(expected, trainable, experiment.method.rounds),
        *result["notices"],
    ]
    text = "\n\n" + "\n".join(f"# {line}" for line in lines)
    if isinstance(experiment.method, Planned):
        indexes = population.federated.clients.values()
        counts = [[len(part) for part in (index.train, index.val, index.test)] for index in indexes]
        if (plan := experiment.method.plan(population.model, counts)) is not None:
            result["plan"] = plan.to_dict()
            text += "\n\n" + "\n".join(f"# {line}" for line in plan.table().splitlines())
    return population, result, text


def _match(experiment: Experiment, population: Partitioned | None) -> tuple[list[dict[str, Any]], str]:
    """How tensors are mixed with those of the foundation model, for the result and as text."""
    from dataclasses import asdict

    from fedfm.core.capabilities import ServerModel

    method = experiment.method
    if not isinstance(method, ServerModel):
        raise InputError(f"--matching: method {experiment.method_name} has no foundation model of its own")
    if population is None:
        raise InputError("--matching: the model is on the SuperLink's machine; run the command there")
    found = method.match_with(population.model)
    head = "# tensor, its shape, the foundation model's shape, the part that is mixed, the reason"
    return [asdict(line) for line in found.table], f"\n\n{head}\n{found}"


def _estimate_lines(forecast: Forecast | None, trainable: int, rounds: int) -> list[str]:
    """Format the cost estimate as lines of text."""
    from fedfm.reports.text import NBSP, duration, plural, size

    if forecast is None:
        return [f"{trainable:,} trainable parameters; the silos have the rows"]
    out = [f"{len(forecast.rows)} clients, {trainable:,} trainable parameters"]
    for name, (train, val, test) in list(forecast.rows.items())[:_SHOWN]:
        held = f", {val} validation" if val else ""
        classes = ", ".join(f"{label} {n}" for label, n in forecast.counts.get(name, {}).items() if n)
        out.append(f"  {name}: {train} training{held}, {test} test rows" + (f" ({classes})" if classes else ""))
    if len(forecast.rows) > _SHOWN:
        out.append(f"  and {len(forecast.rows) - _SHOWN} more")
    if forecast.bytes_up is not None:
        up, down = size(forecast.bytes_up), size(forecast.bytes_down)
        out.append(f"about {up} up and {down} down per client and round, without evaluation")
    if forecast.client_seconds is not None:
        one, every = (max(seconds or 0.0, 0.01) for seconds in (forecast.client_seconds, forecast.run_seconds))
        bound = "at most " if forecast.at_most else ""
        out.append(
            f"{bound}about {duration(one)} of training for the largest client in a round, {duration(every)} for all "
            f"clients in {plural(rounds, 'round')}, one after the other on this machine"
        )
    return [line.replace(NBSP, " ") for line in [*out, f"at least {size(forecast.memory)} of memory"]]
