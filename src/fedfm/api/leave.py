"""Let a client leave a finished run: make the run that the federation without this client would have made.

If a client's messages depend on its own rows only (the trait ``independent_messages``), the result without the client
is a function of the others' messages. The others compute them again from the same rows, seeds and secrets, so the
messages are the same, and nobody's rows are used in a new way. If no round asked the client, the model is already one
without it. Else the others train again from the start, because a run keeps the server's states of its last two rounds
only. The new run's manifest has a certificate. Where the server keeps sums over all rows, the client's own sums are
enough, and nobody else takes part: see :mod:`fedfm.api.leave_by_sums`.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedfm.aggregation.base import Mechanism
from fedfm.api import leave_certificate
from fedfm.api.execute import drive
from fedfm.api.own_sums import in_sum
from fedfm.config.experiment import Experiment
from fedfm.core.kept_sums import KeepsSums
from fedfm.core.text import safe_name
from fedfm.data.owners import number_names
from fedfm.data.partition import DEFAULT_CLIENTS
from fedfm.errors import InputError, close, quote_names
from fedfm.reports import html
from fedfm.runtime import file_integrity
from fedfm.runtime.client_memory import FIRSTS
from fedfm.runtime.disclosure import check_same, fingerprints
from fedfm.runtime.logs import MESSAGES, gaps_of_messages, messages
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.population import populate
from fedfm.runtime.predictions import personal
from fedfm.runtime.progress import Progress
from fedfm.runtime.progress_bar import Bar
from fedfm.runtime.run_directory import Run
from fedfm.runtime.run_folder import MANIFEST, refuse_used

EXACT, RETRAINED, NOT_ASKED, SUBTRACTED = "exact", "retrained", "not asked", "subtracted"
UNFINISHED = "unfinished: the same fedfm leave completes it"  # in the certificate until all is known


def leave(
    path: str | Path,
    client: str,
    out: str | Path | None = None,
    *,
    retrain: bool = False,
    sums: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a new run without a client, from a finished run. A run that did not ask the client gets the certificate.

    If the process was stopped, the same call continues.

    Args:
        path: the finished run, which is not changed, unless it did not ask the client.
        client: the client that leaves.
        out: the new run's directory [RUN-without-CLIENT].
        retrain: whether the others may train again, if the method requires it.
        sums: the client's own sums, which ``fedfm silo sums`` wrote; they are subtracted from those that the server
            kept, and no rows are read. Such a run has no ``accuracy`` and no ``membership``.

    Returns:
        ``run``: the new run; ``exact``: whether the result is that of the others' messages in the old run; ``how``:
        ``exact``, ``subtracted``, ``retrained`` or ``not asked``; ``accuracy`` and ``accuracy_before``, and
        ``same_test_rows``: whether both are of the same rows; ``removed``, ``not_removed``; ``membership`` of the
        client's rows ``before`` and ``after``, None if no attack compares them.

    Raises:
        InputError: the client is unknown or the last one, the run cannot be without it, or it needs ``retrain``.
    """
    run, progress = Run.open(path), progress or Bar()
    name = _find(run, client)
    if sums is not None:
        return _by_sums(run, name, Path(sums), out)
    if not _is_exact(run) and not was_asked(run, name):
        return _certify(run, name, progress.notice)
    _check(run, name)
    experiment = _without(run, name)
    how = EXACT if _is_exact(run) else RETRAINED
    place = _place(run, name, out)
    if not (place / MANIFEST).exists() or not Run.open(place).manifest.get("departures"):
        refuse_used(place)  # before rows and model are read; a run without a client may be this one, begun before
    if how == RETRAINED:
        _agree(run, name, retrain, progress.notice)
    population = populate(run.experiment)
    now = fingerprints(run, population.federated.table, population.model)
    check_same(run, now, "the other clients' messages are made from the original rows")
    if how == EXACT and experiment.privacy is not None:
        _check_classes(run, name, populate(experiment).model.classes, population.model.classes)
    entry = leave_certificate.certificate(run, name, UNFINISHED, population)
    begun = _run_to_complete(place, entry)
    new = begun or _begin(experiment, place, run, entry, keeps_secrets=how == EXACT)
    result = drive(new, progress, fresh=begun is None)
    if how == EXACT and (others := ({*in_sum(run)} ^ {*in_sum(new)}) - {name}):
        how, gone = RETRAINED, f"{quote_names(others)} left out of only one of the two runs"
        progress.notice(f'{gone}, so the new result is not that of the old messages: the certificate says "{how}"')
    membership = leave_certificate.membership(run, new, name, population, progress.notice)
    with new.lock():
        new.manifest["departures"][-1] |= {"how": how, "membership": membership}
        new.write_manifest()
    html.renew(new.path)
    before, same = run.manifest["result"], not _takes_test_rows(run, population, name)
    if not same and before["accuracy"] is not None:
        progress.notice(f"the two accuracies are of different test rows, since the test rows of {name} left with it")
    found = {"run": result["run"], "client": name, "exact": how == EXACT, "how": how}
    found |= {"accuracy": result["accuracy"], "accuracy_before": before["accuracy"], "same_test_rows": same}
    return found | {key: entry[key] for key in ("removed", "not_removed")} | {"membership": membership}


def _by_sums(run: Run, name: str, file: Path, out: str | Path | None) -> dict[str, Any]:
    """Subtract the client's own sums from those that the server kept."""
    from fedfm.api import leave_by_sums

    _check(run, name, by_sums=True)
    leave_by_sums.check(run, name)
    entry = leave_certificate.entry(run, name, SUBTRACTED) | {
        "removed": {"client": name, "rounds": 1},
        "not_removed": leave_certificate.list_what_stays(run),
    }
    entry["not_removed"].append(f"the file of {name}'s own sums, which discloses them: remove it")
    place = _place(run, name, out)
    leave_by_sums.make_run(run, name, file, _without(run, name), place, entry)
    before = run.manifest["result"]["accuracy"]
    found = {"run": str(place), "client": name, "exact": True, "how": SUBTRACTED, "accuracy": None}
    found |= {"accuracy_before": before, "same_test_rows": False, "membership": None}
    return found | {key: entry[key] for key in ("removed", "not_removed")}


def _place(run: Run, name: str, out: str | Path | None) -> Path:
    """The directory of the new run."""
    return Path(out) if out is not None else Path(f"{run.path}-without-{safe_name(name)}")


def was_asked(run: Run, name: str) -> bool:
    """Whether the run's model may depend on the client: a round asked it for more than scores, or nobody may know.

    Keys that are computed from all rows, and a choice of the round by validation rows, depend on every client.
    """
    from fedfm.core import tasks
    from fedfm.runtime.row_sums import AddsRows

    experiment, rounds = run.experiment, set[int]()
    if (
        experiment.run.patience
        or run.manifest.get("lost")
        or gaps_of_messages(run.path / MESSAGES, run.manifest["result"])
        or "cohort" in experiment.aggregation.mechanism.secrets  # drawn by coins, and epsilon needs that nobody tells
        or isinstance(tasks.task_named(experiment.model.task), AddsRows)
    ):
        return True
    for message in messages(run.path / MESSAGES):
        if message["handler"].partition(".")[0] in ("train", "query"):
            rounds.add(message["round"])
            if name in (message["to"], message["from"]):
                return True
    return not {*range(1, run.manifest["result"]["rounds"] + 1)} <= rounds  # else a message is missing


def _certify(run: Run, name: str, notice: Callable[[str], None]) -> dict[str, Any]:
    """Enter the certificate of a client that no round asked into the manifest of the same run."""
    result = run.manifest["result"]
    notice(f"no round asked {name}, so the model is already one without it, and nothing has to be computed")
    entry = leave_certificate.entry(run, name, NOT_ASKED) | {
        "removed": {"client": name, "rounds": 0},
        "not_removed": ["the draw of the clients of each round, which counted this client; it took none of its rows"],
    }
    with run.lock(wait=True):
        run.manifest["departures"] = [*run.manifest.get("departures", ()), entry]
        run.write_manifest()
    html.renew(run.path)
    found = {"run": str(run.path), "client": name, "exact": True, "how": NOT_ASKED, "accuracy": result["accuracy"]}
    found |= {"accuracy_before": result["accuracy"], "same_test_rows": True, "membership": None}
    return found | {key: entry[key] for key in ("removed", "not_removed")}


def _find(run: Run, client: str) -> str:
    """The name of a client of the finished run."""
    path = run.path
    if run.manifest["result"] is None:
        raise InputError(f"{path} is not finished; run `fedfm resume {path}` first")
    if client in run.manifest.get("newcomers", {}):
        raise InputError(f"{path}: {client} joined after training, and no other model depends on it; remove its folder")
    return find_client([*run.manifest["clients"], *absent_clients(run)], client)


def _check(run: Run, name: str, *, by_sums: bool = False) -> None:
    """Refuse a client that cannot leave the run. Its own sums suffice if no rows are on this machine."""
    experiment, clients, path = run.experiment, run.manifest["clients"], run.path
    if name not in clients and not _is_exact(run):
        raise InputError(f"{path}: {name} has no training rows and took no part in it: there is nothing to remove")
    if clients == [name]:
        raise InputError(f"{path}: {name} is the only client; without it there is no run: remove the folder")
    if experiment.in_memory or experiment.own_code:
        raise InputError(
            f"{path}: data and model of this run came from Python; call fedfm.federate(...) without {name}"
        )
    if personal(experiment.method):
        raise InputError(
            f"{path}: every client has its own model, and those of the others learned from {name}; a new run without "
            f"{name} gives them new models: fedfm run EXPERIMENT --set 'data.without=[\"{name}\"]'"
        )
    if experiment.attack is not None:
        raise InputError(f"{path}: its [attack] would choose other attackers without {name}; run the experiment again")
    if run.manifest["split"] is None and not by_sums:
        others, instead = ", ".join(c for c in clients if c != name), ""
        if isinstance(experiment.method, KeepsSums):
            instead = f". Or {name} alone takes part: `fedfm silo sums` writes its own sums, and --sums subtracts them"
        raise InputError(
            f"{path}: the silos' rows are not on this machine, and the run without {name} needs one more run of "
            f"{others}; {name} need not take part: remove it from the federation, then `fedfm run` the experiment "
            f"again{instead}"
        )
    if experiment.privacy is not None and experiment.privacy.states_epsilon and not _is_exact(run):
        raise InputError(
            f"{path}: its epsilon stays spent, also for {name}; training again would release the others' "
            "rows once more, which no ledger of this run counts: run the experiment again, and add the two epsilons"
        )


def absent_clients(run: Run) -> list[str]:
    """The clients of a partition by numbers that got no training rows, and so took no part."""
    data = run.experiment.data
    if data.clients is not None or data.partition.name == "by_column":
        return []
    names = number_names("client", data.partition.clients or DEFAULT_CLIENTS, 2)
    return [name for name in names if name not in run.manifest["clients"] and name not in data.without]


def find_client(clients: list[str], name: str) -> str:
    """The client of this name. A number may lack its leading zeros: ``client-0`` is ``client-00``.

    Raises:
        InputError: there is no such client.
    """
    stem, _, number = name.rpartition("-")
    alike = [
        c for c in clients if c.rpartition("-")[0] == stem and c.rpartition("-")[2].lstrip("0") == number.lstrip("0")
    ]
    if name in clients or (number.isdecimal() and len(alike) == 1):
        return name if name in clients else alike[0]
    raise InputError(f'"{name}": no client of the run; expected one of {quote_names(clients)}{close(name, clients)}')


def _without(run: Run, name: str) -> Experiment:
    """The experiment without the client."""
    tables = copy.deepcopy(run.manifest["experiment"])
    data, method = tables["data"], tables["method"]
    if data.get("clients") and data.get("limit") is None:  # the limit is over all clients
        del data["clients"][name]
    else:
        data["without"] = [*data.get("without", ()), name]
    if (
        tables["run"].get("engine") == "deployment" and run.manifest["split"] is not None
    ):  # this machine has all rows, and the secrets of the noise
        tables["run"]["engine"] = "local"
        tables["run"].pop("superlink", None)
    if isinstance(method.get("budgets"), dict):
        method["budgets"].pop(name, None)
    if len(ranks := method.get("ranks") or ()) > 1 and name in (clients := run.manifest["clients"]):  # by position
        method["ranks"] = [ranks[i % len(ranks)] for i, client in enumerate(clients) if client != name]
    if any(name in edge for edge in method.get("edges") or ()):
        raise InputError(f"method.edges name {name}, and the edges without it are unknown; run again with other edges")
    return Experiment.from_dict(tables, imports=True)


def _is_exact(run: Run) -> bool:
    """Whether the result without a client is a function of the others' messages, which no mechanism covers by noise."""
    experiment = run.experiment
    return experiment.method.traits.independent_messages and type(experiment.aggregation.mechanism) is Mechanism


def _agree(run: Run, name: str, retrain: bool, notice: Callable[[str], None]) -> None:
    """Say what training again costs.

    Raises:
        InputError: the user has not agreed.
    """
    result, others = run.manifest["result"], len(run.manifest["clients"]) - 1
    rounds, seconds = result["rounds"], result["seconds"] * others / (others + 1)
    cost = f"{rounds} rounds of {others} clients, about {max(round(seconds), 1)} s by the first run's time"
    if not retrain:
        raise InputError(
            f"{run.path}: without {name}, the result of {run.experiment.method_name} does not follow from the "
            f"others' messages; they must train again from the start: {cost}; add --retrain to do so"
        )
    notice(f"training again without {name}: {cost}")


def _check_classes(run: Run, name: str, now: Sequence[str], before: Sequence[str]) -> None:
    """Refuse if the others would have to release sums of other classes, which would be a second private release."""
    if gone := [label for label in before if label not in now]:
        raise InputError(
            f"{run.path}: only {name} has rows of {quote_names(gone)}; without them the others' noisy sums would be of "
            "other classes, so each would be a second release of the same rows, which no epsilon of this run counts: "
            "run the experiment again, and add the two epsilons"
        )


def _takes_test_rows(run: Run, population: Partitioned, name: str) -> bool:
    """Whether test rows leave with the client: those of its own file, or those that a column gives it."""
    data, held = run.experiment.data, population.federated.clients.get(name)
    return held is not None and len(held.test) > 0 and (data.clients is not None or data.partition.name == "by_column")


def _run_to_complete(out: Path, entry: Mapping[str, Any]) -> Run | None:
    """The new run, if an earlier process began it with this certificate and was stopped before it was complete."""
    if not (out / MANIFEST).exists():
        return None
    run = Run.open(out)
    last = (run.manifest.get("departures") or [{}])[-1]
    same = all(last.get(key) == entry[key] for key in ("client", "how", "removed"))
    return run if same and last["from"]["params_sha256"] == entry["from"]["params_sha256"] else None


def _begin(experiment: Experiment, out: Path, run: Run, entry: dict[str, Any], *, keeps_secrets: bool) -> Run:
    """Make the new run. Its first manifest has the certificate, and is written after the secrets.

    So a process that is killed leaves no run that ``fedfm resume`` would continue with other noise.
    """

    class Begun(Run):
        def write_manifest(self) -> None:
            if not (self.path / MANIFEST).exists():
                if keeps_secrets:
                    _copy_secrets(run, self, entry["client"])
                self.manifest["departures"] = [*run.manifest.get("departures", ()), entry]
            super().write_manifest()

    return Begun.create(experiment, out)


def _copy_secrets(run: Run, new: Run, name: str) -> None:
    """Give the new run the others' secrets, so that each sends its noisy release again instead of a second one.

    What a client writes once, e.g. the digest of its release, goes along: a client refuses any other release.
    """
    source, memory = run.path / "private", new.path / "private" / "memory"
    kept = {safe_name(c): c for c in run.manifest["clients"] if c != name}
    for path in file_integrity.secrets(source):
        party = path.parent.name
        if party in kept and path.parent.parent.name == "memory":
            (memory / party).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, memory / party / path.name)
            names = file_integrity.files(memory / party)
            file_integrity.write_list(file_integrity.list_of(memory, kept[party]), names, sync=True)
    for root in file_integrity.roots(source):
        for party in kept:
            if (written := root / FIRSTS / party).is_dir():
                shutil.copytree(written, memory / FIRSTS / party, dirs_exist_ok=True)
