"""Studies of several runs: seeds with an interval, a learning rate chosen on validation rows, baselines, and the
demo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfm.api import execute
from fedfm.api.intervals import FIGURES, bounds, rows_behind
from fedfm.config.experiment import Experiment
from fedfm.config.toml import put
from fedfm.core.capabilities import Comparable
from fedfm.core.locks import alone_in
from fedfm.core.messages import SCORES
from fedfm.core.method import Method
from fedfm.errors import InputError, RunError
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run
from fedfm.runtime.run_folder import own_place
from fedfm.runtime.runs_below import write_order


@contextlib.contextmanager
def _study(folder: Path, shared: bool = False) -> Iterator[None]:
    """Context manager: make the folder of several runs and lock it for this process. Only its owner can read it.

    Args:
        shared: whether others can read it as well, as with ``run.shared``.

    Raises:
        InputError: the folder cannot be made, or another process works in it.
    """
    with alone_in(folder, "running a study", 0o777 if shared else 0o700):
        yield


def _at(experiment: Experiment, key: str, value: Any) -> Experiment:
    """The experiment with one key changed, e.g. ``run.seed``."""
    table = experiment.to_dict()
    put(table, key, value)
    return dataclasses.replace(Experiment.from_dict(table, imports=True), tuning=experiment.tuning)


def seeds(experiment: Experiment, which: Sequence[int], out: Path | None, progress: Progress) -> dict[str, Any]:
    """Run each seed in its own folder; finished runs are not repeated.

    Returns:
        The runs' results, mean and 95 % interval of every metric (see :mod:`fedfm.api.intervals`), and the total
        epsilon and delta: each run is a separate release, and basic composition adds both.
    """
    if len(set(which)) != len(which):
        raise InputError(f"--seeds {','.join(map(str, which))}: a seed occurs twice")
    out = out or own_place(experiment.name)
    with _study(out, experiment.run.shared):
        results = [_run_to_end(_at(experiment, "run.seed", seed), out / f"seed-{seed}", progress) for seed in which]
    figures = {}
    runs = [Run.open(Path(r["run"])) for r in results]
    for key in FIGURES:
        values = [r[key] for r in results if r.get(key) is not None]
        if len(values) == len(results):
            low, high = bounds(key, values, sum(rows_behind(key, run) for run in runs))
            figures[key] = {"mean": sum(values) / len(values), "low": low, "high": high, "values": values}
    spent = [r["epsilon"] for r in results if r.get("epsilon") is not None]
    deltas = [run.manifest["guarantee"]["delta"] for run in runs if run.manifest.get("guarantee")]
    means = {key: figure["mean"] for key, figure in figures.items()} | {"epsilon": sum(spent) if spent else None}
    means["delta"] = math.fsum(delta for delta in deltas if delta is not None) if spent else None
    return {"runs": results, "seeds": list(which), "figures": figures} | means


def _run_to_end(experiment: Experiment, folder: Path, progress: Progress) -> dict[str, Any]:
    """The result of the experiment in this folder. Its run is started or continued if needed."""
    if (folder / "manifest.json").exists():
        run = Run.open(folder)
        if run.experiment.to_dict() != experiment.to_dict():
            raise InputError(f"{folder} contains a run of another experiment; give another --out")
        return execute.resume(folder, progress=progress)
    return execute.run(experiment, folder, progress=progress)


def seeds_text(result: dict[str, Any]) -> str:
    """The study as text, with one line for each metric."""
    lines = [f"seeds {', '.join(map(str, result['seeds']))}"]
    for key, figure in result["figures"].items():
        line = f"{key:<18} {figure['mean']:.4f}"
        if figure["low"] is not None:
            line += f"  95 % interval {figure['low']:.4f} to {figure['high']:.4f}"
        elif len(figure["values"]) > 1:
            line += "  the same for every seed; no interval, since the number of test rows is unknown"
        lines.append(line)
    if result["epsilon"] is not None:
        of = f"{'epsilon':<18} {result['epsilon']:g}  in total, with delta {result['delta']:g}"
        lines.append(f"{of}: each seed is a new release from the same rows")
    lines.append(f"reports: {Path(result['runs'][0]['run']).parent}/seed-*/report.html")
    return "\n".join(lines)


def with_baselines(experiment: Experiment, out: Path | None, progress: Progress) -> dict[str, Any]:
    """Run an experiment and its method's baselines, each in its own folder; finished runs are not repeated.

    Returns:
        The experiment's result; under ``baselines`` it has the results of the baselines by name.

    Raises:
        InputError: the method has no baselines.
    """
    from fedfm.config.registry import name_of
    from fedfm.reports import html

    method = experiment.method
    baselines = method.baselines() if isinstance(method, Comparable) else {}
    if not baselines:
        raise InputError(f"--baselines: method {experiment.method_name} has no baselines; drop --baselines")
    out = out or own_place(experiment.name)
    with _study(out, experiment.run.shared):
        main = _run_to_end(experiment, out / experiment.method_name, progress)
        others = {}
        for name, other in baselines.items():
            if not isinstance(other, Method):
                raise InputError(f"--baselines: {name} of method {experiment.method_name} is not a method")
            progress.notice(f"baseline: {name}")
            changed = dataclasses.replace(experiment, name=name, method=other, method_name=name_of("methods", other))
            others[name] = _run_to_end(changed, out / name, progress)
        write_order(out, [experiment.method_name, *others])
        html.write(out / experiment.method_name)
    return main | {"baselines": others}


def baselines_text(result: dict[str, Any]) -> str:
    """The table of the run and its baselines."""
    from fedfm.reports import compare

    runs = [Path(r["run"]) for r in (result, *result["baselines"].values())]
    return f"{compare.table(runs).rstrip()}\nreport: {runs[0] / 'report.html'}"


def tune(experiment: Experiment, rates: Sequence[float], out: Path | None, progress: Progress) -> Experiment:
    """Choose the learning rate with the lowest validation loss. Test rows are not used.

    A rate is left out if a client sent scores for another rate but not for this one, because the rows would differ.
    The ledger of the chosen run lists the trials: rate, validation loss, bytes, seconds, and the reason of a failure.

    Raises:
        InputError: there are no validation rows, or a rate occurs twice.
        RunError: no rate gave a validation loss.
    """
    if experiment.privacy is not None:
        raise InputError("--tune: [privacy] does not cover validation losses of single clients; drop one of the two")
    if not experiment.data.val_fraction:
        raise InputError(
            "--tune: there are no validation rows; set data.val_fraction, e.g. --set data.val_fraction=0.1"
        )
    if len(set(rates)) != len(rates):
        raise InputError(f"--tune {','.join(f'{rate:g}' for rate in rates)}: a learning rate occurs twice")
    folder = (out.parent / f"{out.name}-tune") if out else own_place(f"{experiment.name}-tune")
    losses: dict[float, float] = {}
    silent: dict[float, set[str]] = {}  # clients that sent no scores after the last round, by rate
    trials = []
    # Build all experiments first, so that an invalid rate is refused before any run.
    experiments = [(rate, _at(experiment, "method.local.learning_rate", rate)) for rate in rates]
    with _study(folder, experiment.run.shared):
        for rate, trial in experiments:
            place, failed = folder / f"rate-{rate:g}", {}
            try:
                cost: Mapping[str, Any] = _run_to_end(trial, place, progress)
            except RunError as error:  # e.g. because training diverges at this rate
                cost = next(reversed(Run.open(place).metrics()), {})
                failed = {"failed": str(error)}
            loss = None if failed else cost["details"].get("val_loss")
            spent = {key: cost.get(key, 0) for key in ("bytes_up", "bytes_down", "seconds")}
            trials.append({"learning_rate": rate, "val_loss": loss} | spent | failed)
            outcome = failed.get("failed") or ("no validation loss" if loss is None else f"validation loss {loss:.4f}")
            progress.notice(f"learning rate {rate:g}: {outcome}")
            if loss is not None:
                losses[rate] = loss
                silent[rate] = _without_scores(cost, Run.open(place))
    always = set.intersection(*silent.values()) if silent else set()
    for rate, clients in silent.items():
        if more := sorted(clients - always):
            progress.notice(f"learning rate {rate:g} is not compared: its loss lacks the rows of {', '.join(more)}")
            del losses[rate]
    if not losses:
        raise RunError(f"--tune: no learning rate gave a validation loss of all clients; the runs are in {folder}")
    best = min(losses, key=lambda rate: losses[rate])
    progress.notice(f"learning rate {best:g} has the lowest validation loss and is used")
    return dataclasses.replace(_at(experiment, "method.local.learning_rate", best), tuning=tuple(trials))


def _without_scores(result: Mapping[str, Any], run: Run) -> set[str]:
    """Clients that sent no scores after the last round, or for the best round's model."""
    line: Mapping[str, Any] = next(reversed(run.metrics()), {})
    last = [e for e in result["excluded"] if e["round"] == result["rounds"]]
    return {e["client"] for e in (*line.get("excluded", ()), *last) if e["part"] == SCORES}


# --- the demo --------------------------------------------------------------------------------------------------------

DEMO: dict[str, Any] = {
    "data": {"name": "digits", "partition": {"name": "dirichlet", "alpha": 0.1, "clients": 10}},
    "model": {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 4, "layers": 4}},
    "method": {"name": "fedavg", "rounds": 10, "local": {"learning_rate": 0.2}},
    "run": {"evaluate_every": 1},
}


def demo(out: Path | None, seed: int, progress: Progress) -> dict[str, Any]:
    """Train nano-vit with LoRA over ten clients with skewed digits, then the baselines; return the results of all."""
    from fedfm.reports import html

    out = out or own_place("demo")
    runs: dict[str, dict[str, Any]] = {
        "fedavg": {},
        "fedavg-random-weights": {"model.weights": "random"},
        "zero-rounds": {"method.rounds": 0},
        "each-client-alone": {"method.name": "local", "run.evaluate_every": 0},
        "centralised": {"method.name": "centralised", "run.evaluate_every": DEMO["method"]["rounds"]},
    }
    began, results = time.perf_counter(), {}
    with _study(out):
        for name, changes in runs.items():
            table = {k: dict(v) for k, v in DEMO.items()} | {"name": name}
            for key, value in ({"run.seed": seed} | changes).items():
                put(table, key, value)
            results[name] = _run_to_end(Experiment.from_dict(table), out / name, progress)
        report = html.write(out / "fedavg", baselines=[out / name for name in runs if name != "fedavg"])
    return {"rows": results, "report": str(report), "seconds": round(time.perf_counter() - began, 1)}


def demo_text(result: dict[str, Any]) -> str:
    """The demo's results as a table."""
    from fedfm.reports import compare

    table = compare.table([Path(r["run"]) for r in result["rows"].values()])
    return f"{table.rstrip()}\n\nreport: {result['report']}   ({result['seconds']} s)"
