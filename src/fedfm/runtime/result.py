"""End a run: write the result line, the last entries of the ledger, and the models."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.capabilities import Private
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.messages import ROUND
from fedfm.core.method import Method
from fedfm.core.metric_names import (
    ACCURACY,
    BALANCED_ACCURACY,
    GLOBAL_ACCURACY,
    LOCAL_ACCURACY,
    LOCAL_LOSS,
    LOSS,
    MACRO_F1,
    PERPLEXITY,
)
from fedfm.core.update_metrics import BEFORE, LOSS_BEFORE, PASSES
from fedfm.errors import E_REFUSED
from fedfm.linalg.params import Params, sha256_of
from fedfm.models.adapter_files import ABOUT, save, sha256_of_file
from fedfm.models.metrics import BASE_AND_NEW
from fedfm.models.model import Model
from fedfm.privacy.accountant import Accountant
from fedfm.runtime import early_stopping, failures, logs
from fedfm.runtime.after_run_checks import outside, overfitting_notices
from fedfm.runtime.client_memory import Store
from fedfm.runtime.disclosure import guarantee, rows_of
from fedfm.runtime.evaluation import Evaluator
from fedfm.runtime.exposure import exposure_of
from fedfm.runtime.judge import CLASS_COUNTS, CONFUSION
from fedfm.runtime.predictions import feature_transform, keeps_parts
from fedfm.runtime.run_directory import Run

SUMS = "sums.safetensors"  # in a newcomer's folder: the sums of all clients up to this one
# Metrics of the last evaluation, in their order in the result line.
_METRICS = [ACCURACY, GLOBAL_ACCURACY, LOCAL_ACCURACY, "client_accuracy", LOCAL_LOSS, BALANCED_ACCURACY]
_METRICS += [MACRO_F1, LOSS, PERPLEXITY]


def finish(
    run: Run,
    fed: Federation,
    evaluator: Evaluator,
    state: Any,
    rounds: tuple[int, int],
    seconds: float,
    notice: Callable[[str], None],
    aside: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the result, the ledger and the models; return the result as it is written.

    Args:
        aside: further entries of ``details``, which come from the engine.
        rounds: (t, of): the number of completed rounds, and the round of the final model.
    """
    t, of = rounds
    method: Method[Any] = run.experiment.method
    models, spent = evaluator.collect_models(state), account_of(run, t)
    last: dict[str, Any] = next((m for m in reversed(run.metrics()) if "client_accuracy" in m), {})
    if not last or last["round"] != of or t < method.rounds:  # round ``of`` had no thorough evaluation
        last = evaluator.scores(state, thorough=True)
    left_out = failures.whole(fed.excluded, run.metrics(), evaluator.missing)
    result: dict[str, Any] = {
        "run": str(run.path),
        "method": run.experiment.method_name,
        "engine": run.experiment.run.engine,
        "seed": run.experiment.run.seed,
        "rounds": t,
        "seconds": round(seconds, 3),
        **{name: last.get(name) for name in _METRICS},
        "bytes_up": fed.transcript.bytes_up,
        "bytes_down": fed.transcript.bytes_down,
        "epsilon": spent.epsilon,
        "params_sha256": sha256_of(models or evaluator.models(state)),
        "excluded": [asdict(e) for e in left_out if e.part == ROUND or e.code != E_REFUSED],
        "attackers": list(run.manifest.get("attackers", [])),
        **({"attack_success": last["attack_success"]} if "attack_success" in last else {}),
        "details": method.details(state, evaluator.judge),
        **({"lost": run.manifest["lost"]} if run.manifest.get("lost") else {}),
    }
    result["details"] |= aside
    if keeps_parts(method):
        result["server_sha256"] = sha256_of(evaluator.models(state))
    result["details"] |= _more_scores(fed.model, last)
    if chosen := last.get("chosen"):
        run.manifest["chosen"] = chosen
        fed.model.task = replace(fed.model.task, **chosen)
        result["details"] |= chosen
    for text in fed.model.task.remarks(last):
        notice(text)
    details, notices = early_stopping.summarise(run, t, of)
    result["details"] |= details
    for text in notices:
        notice(text)
    result["details"] |= run.join_arrays(fed.clients)
    lines = run.metrics()
    result["details"] |= _of_rounds(run.experiment, lines) | arrivals(run, lines)
    if run.experiment.run.evaluate_fraction < 1:
        from fedfm.runtime import sampled_clients

        more_details, texts = sampled_clients.summarise(run, fed.clients, evaluator.panel, lines)
        result["details"] |= more_details
        _say(run, notice, texts)
    _count(run, lines)
    enter(run, spent)
    privacy = run.manifest["experiment"].get("privacy")
    write_models(run, fed.model, models)
    run.manifest["models"] = len(models)
    run.note_messages(fed)  # log the messages that asked for the final models
    known = run.manifest["notices"]  # a resumed run may have the method's notices already
    _say(run, notice, [text for text in method.notices(state) if text not in known])
    _say(run, notice, failures.sentences(left_out, t))
    hindsight = overfitting_notices(lines, run.experiment) if of == t else []
    if privacy is None:  # this notice has counts that depend on the clients' rows, and no epsilon covers them
        hindsight += outside(fed.model.module)
    _say(run, notice, hindsight)
    result["warnings"] = list(run.manifest["notices"])
    run.manifest["seen"] = exposure_of(run.path / logs.MESSAGES, {(e.round, e.client) for e in fed.excluded}).to_dict()
    run.manifest["guarantee"] = guarantee(run.manifest["ledger"] | {"epsilon": result["epsilon"]}, privacy)
    run.manifest["result"] = result
    run.manifest["finished"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run.write_manifest()
    return result


def _say(run: Run, notice: Callable[[str], None], texts: Iterable[str]) -> None:
    """Write notices into the manifest, and show them."""
    for text in texts:
        run.note(text)
        notice(text)


def _more_scores(model: Model, last: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of the last evaluation that are entries of ``details``."""
    task = model.task
    names = [*BASE_AND_NEW, "client_base_and_new", "server_accuracy", "server_client_accuracy", "server_loss"]
    names += [CONFUSION, CLASS_COUNTS, *task.figures]
    names += [f"local_{key}" for key in (*task.common_figures, *task.figures)]
    names += ["client_loss", "server_client_loss", "val_loss", "client_metrics"]
    return {key: by_class(model, last[key]) for key in names if key in last}


def _of_rounds(experiment: Experiment, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the coding errors of all rounds, and the last scores that clients measured before an aggregation."""
    found: dict[str, Any] = {}
    if coded := [line["transport"] for line in lines if "transport" in line]:
        from fedfm.core.transport import over_rounds
        from fedfm.linalg.quantised import BLOCK

        precision = experiment.run.transport
        block = {"block": BLOCK} if precision == "int8" else {}
        found["transport"] = {"precision": precision} | block | over_rounds(coded)
    if experiment.run.local_scores:
        for key in (BEFORE, LOSS_BEFORE):
            found[key] = next((m[key] for m in reversed(lines) if m.get(key) is not None), None)
    return found


def by_class(model: Model, value: Any) -> Any:
    """Turn a list with an entry for each class of the model into {class: entry}; return any other value unchanged."""
    named = isinstance(value, list) and len(value) == len(model.classes) and not any(isinstance(v, list) for v in value)
    return dict(zip(model.classes, value, strict=True)) if named else value


def account_of(run: Run, t: int) -> Accountant:
    """Return the privacy that the run spends by its method and by its aggregation's mechanism.

    Args:
        t: number of completed rounds.
    """
    again = run.experiment.aggregation.mechanism.repeat_count(Store(run.path / "private", "server"))
    return spending(run.experiment, rows_of(run), run.repeat_count(t) + again)


def spending(experiment: Experiment, rows: Sequence[int] | None, repeated: int = 0) -> Accountant:
    """Return the privacy that an experiment spends.

    Args:
        rows: the clients' numbers of rows; None if they are unknown.
        repeated: number of rounds that were repeated; each of them is one more release.
    """
    accountant, method = Accountant(), experiment.method
    if isinstance(method, Private):
        method.spend(accountant)
    experiment.aggregation.mechanism.spend(accountant, method.rounds + repeated, rows)
    return accountant


def enter(run: Run, spent: Accountant) -> None:
    """Write the privacy cost of all planned rounds into the ledger. This happens before the first round.

    If the run ends early, the entry does not change.
    """
    ledger = run.manifest["ledger"]
    entries = [*(entry for entry in ledger["entries"] if "mechanism" not in entry), *spent.entries()]
    if entries != ledger["entries"]:
        ledger |= {"entries": entries, "epsilon": spent.epsilon}
        run.write_manifest()


def _count(run: Run, lines: Sequence[Mapping[str, Any]]) -> None:
    """Complete the ledger's numbers of multiply-accumulates: in all rounds, and in those until the target accuracy."""
    from fedfm.models.multiply_accumulates import Costs, rounds_to

    found = run.manifest["ledger"].get("operations")
    if found is None:
        return
    if run.manifest["split"] is None:  # silos have their own files, and the server does not know their numbers of rows
        found |= {"samples": None, "macs_per_client_round": None}
        return
    if logs.gaps_of_metrics(run.path / logs.METRICS, max((line["round"] for line in lines), default=0)):
        found["macs"] = None  # the cohort of a round without a line is unknown
        return
    costs = Costs(*(found[key] for key in ("macs_per_sample", "macs_once_per_sample", "epochs", "samples")))
    cohorts, passes = ([line.get(key, 0.0) for line in lines if line["round"]] for key in ("cohort", PASSES))
    found["macs"] = costs.tmac(cohorts, passes)
    if any(passes):
        visits = sum(map(len, cohorts))
        found["macs_per_client_round"] = (found["macs"] - costs.once(cohorts)) / visits
    target = run.experiment.run.target_accuracy
    if target is not None:
        rounds = rounds_to(target, [(line["round"], line.get("accuracy")) for line in lines])
        found |= {"target_accuracy": target, "rounds_to_target": rounds}
        found["tmac"] = None if rounds is None else costs.tmac(cohorts[:rounds], passes)


def arrivals(run: Run, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return figures about an asynchronous run: mean and largest staleness of its updates.

    With a simulated clock there are two more figures: the clock's time at the end, and the time that it would show if
    every round had waited for all clients.
    """
    if run.experiment.run.asynchronous is None or not (known := [line for line in lines if "staleness" in line]):
        return {}
    counts = [len(line["cohort"]) for line in known]
    mean = sum(n * line["staleness"] for n, line in zip(counts, known, strict=True)) / sum(counts)
    found = {"mean_staleness": mean, "largest_staleness": max(line["largest_staleness"] for line in known)}
    return {"asynchronous": found | {key: known[-1][key] for key in ("clock", "synchronous_clock") if key in known[-1]}}


def write_models(run: Run, model: Model, models: Mapping[ClientId, Params], *, last: bool = False) -> None:
    """Write the final models.

    Args:
        last: whether these are the last round's models, although ``run.patience`` chose another round's models.

    Raises:
        RunError: the models cannot be written.
    """
    for client, w in models.items():
        folder = run.adapter(client, last=last)
        with storage.writing(folder, of_run=True):
            save(model, w, folder, feature_transform(run.experiment.method))
        note_files(run, folder)


def note_files(run: Run, folder: Path) -> None:
    """Enter a model's files into the manifest: the SHA-256 of each ``fedfm.json``, which has those of the tensors.

    So that a file of another run, which has its own ``fedfm.json``, is noticed (:mod:`fedfm.runtime.result_match`).
    """
    found = sorted([*folder.rglob(ABOUT), *folder.glob(SUMS)])
    files = {str(path.relative_to(run.path)): sha256_of_file(path) for path in found}
    run.manifest["model_files"] = run.manifest.get("model_files", {}) | files
