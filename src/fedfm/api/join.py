"""Make a model for a client that joins after training, from a finished run and without another round.

If the model is a function of sums over rows, the newcomer's sums are added to those that the server kept, and the model
is the one that training with the newcomer from the start would have given. Else the newcomer trains on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from fedfm.aggregation.base import Aggregator
from fedfm.api import joined_rows
from fedfm.api.figures_runs import need_model
from fedfm.api.own_sums import why_no_sum
from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.capabilities import Joinable
from fedfm.core.fields import toml_value
from fedfm.core.kept_sums import KeepsSums, sums_of
from fedfm.core.libraries import refuse
from fedfm.core.messages import Request
from fedfm.core.method import Method
from fedfm.core.new_folders import temporary_folder
from fedfm.core.text import NAME_WORDS, is_name
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.linalg.threads import torch_threads
from fedfm.models.adapter_files import save_adapter
from fedfm.models.model import Model
from fedfm.reports import html
from fedfm.runtime import beforehand, predictions, result_match, run_manifest
from fedfm.runtime.client import Silos
from fedfm.runtime.disclosure import JOINED, check_same
from fedfm.runtime.own_rows import OwnRows, columns_of, populate
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.progress import Progress
from fedfm.runtime.progress_bar import Bar
from fedfm.runtime.result import SUMS, note_files
from fedfm.runtime.result_match import final_state
from fedfm.runtime.run_directory import Run
from fedfm.training import TrainsLocally, any_rank

NAME = "newcomer"


@refuse("the newcomer cannot join with this model and these rows")
def join(
    path: str | Path, data: str | Path, client: str | None = None, *, progress: Progress | None = None
) -> dict[str, Any]:
    """Train a newcomer's model, and store it in the run under the newcomer's name.

    Args:
        path: a finished run.
        data: the newcomer's rows, in any form that an experiment takes. The model is evaluated on the rows that are
            marked as test rows, or else on ``data.test_fraction`` of all rows.
        client: the newcomer's name ["newcomer", with a number if this name is taken].
        progress: receives notices about the newcomer's rows; by default they go to stderr.

    Returns:
        ``accuracy`` of the newcomer's model on the newcomer's test rows; ``start_accuracy``, measured before the last
        local training, or before the newcomer's sums were added; ``alone_accuracy``, measured after the same number of
        local trainings without the federation, or with the newcomer's sums only; ``weights``: the fraction that each
        client has in the newcomer's start weights; ``adapter``: the model's path; ``how``: ``sums`` or ``trained``.

    Raises:
        InputError: the run is not finished, the method has no models for newcomers, or the rows are of another kind.
    """
    run = Run.open(path)
    experiment = run.experiment
    experiment = replace(experiment, model=replace(experiment.model, **run.manifest.get("chosen", {})))
    if run.manifest["result"] is None:
        raise InputError(f"{path} is not finished; run `fedfm resume {path}` first")
    need_model(run)
    if experiment.in_memory or experiment.own_code:
        raise InputError(f"{path}: its module is the user's own, but join takes only runs of an experiment file")
    method = experiment.method
    if isinstance(method, KeepsSums):
        _check_sums(experiment, method)
    if not os.access(run.path, os.W_OK):
        raise InputError(
            f"{path} cannot be written, but the newcomer's model must be stored there; join a copy of the run"
        )
    if not Path(data).exists():
        raise InputError(f"{data}: no such file or folder; join needs the newcomer's rows")
    columns = columns_of(experiment.data)
    classes, models = tuple(run.manifest["model"]["classes"]), (experiment.model.name,)

    def read(name: str, data: str | Path) -> Partitioned:
        brought = OwnRows(name, str(Path(data).resolve()), classes=classes, models=models, columns=columns)
        return populate(brought, experiment, run.manifest["model"]["classes"])

    with torch_threads(1), run.lock(), temporary_folder() as memory:
        name = _free(run, client)  # another process may have added a newcomer to the run
        if not is_name(name):  # a folder gets this name
            raise InputError(f"name = {toml_value(name)}: expected {NAME_WORDS}")
        population = read(name, data)
        _check_kind(run, population, data)
        model = population.model
        population.encode = partial(predictions.encode_rows, method, model)
        rows = population.data(name)
        if not len(rows.train):
            raise InputError(f"{data}: no training rows")
        said = [*population.federated.notices, *run_manifest.row_notices(population), *beforehand.notices(population)]
        for text in said:
            (progress or Bar()).notice(text)
        if not len(rows.test):
            (progress or Bar()).notice(f"{data}: no row is left for tests, so no accuracy is known")
        if isinstance(method, KeepsSums):
            for text in joined_rows.notices(run, name, population, read):
                (progress or Bar()).notice(text)
        state, weights = final_state(run, method.state_type), dict[str, float]()
        summed: Params | None = None
        if isinstance(method, KeepsSums):
            w, start, alone, summed = _by_sums(run, experiment, population, memory, name, state)
        else:
            w, start, alone, weights = _by_training(experiment, population, memory, name, state)
        found = {
            key: predictions.scores(method, model, value, rows.test)["accuracy"] if len(rows.test) else None
            for key, value in (("accuracy", w), ("start_accuracy", start), ("alone_accuracy", alone))
        } | {"how": "trained" if summed is None else "sums"}
        with storage.writing(run.adapter(name)):
            folder = save_adapter(model, w, run.adapter(name))
            if summed is not None:
                save_file(summed.state(), run.adapter(name) / SUMS)
        note_files(run, folder)
        run.manifest.setdefault("newcomers", {})[name] = {"data": str(data), **found, "weights": weights}
        if JOINED not in run.manifest["do_not_share"]:
            run.manifest["do_not_share"].append(JOINED)
        run.write_manifest()
    html.renew(run.path)
    return {"run": str(path), "client": name, **found, "adapter": str(folder), "weights": weights}


def _by_training(
    experiment: Experiment, population: Partitioned, memory: Path, name: str, state: Any
) -> tuple[Params, Params, Params, dict[str, float]]:
    """The newcomer's model after its local training, before it, without the federation, and each client's fraction."""
    method, model = experiment.method, population.model
    w_0: Params = model.params()
    adapt, own = _passes(experiment, population, memory / "with", name, w_0)
    start, weights = _start(method, model, state, w_0, name, adapt)
    w = own(adapt(start)) if set(start) == set(model.names) else start  # otherwise start has several trained models
    alone, own_alone = _passes(experiment, population, memory / "alone", name, w_0)
    return w, start, own_alone(alone(alone(w_0))), weights


def _by_sums(
    run: Run, experiment: Experiment, population: Partitioned, memory: Path, name: str, state: Params
) -> tuple[Params, Params, Params, Params]:
    """Models from all sums, from the sums without the newcomer's, and from its own; and the state with all sums.

    Clients that joined before count as well.
    """
    method, model, seed = experiment.method, population.model, experiment.run.seed
    assert isinstance(method, KeepsSums)  # noqa: S101 - the caller has asked
    for earlier in run.manifest.get("newcomers", {}):
        result_match.refuse_other_model(run, run.adapter(earlier))
        state = Params(load_file(run.adapter(earlier) / SUMS))
    silos = Silos(method, Aggregator(), population, memory=memory, seed=seed)
    own = method.own_sums(silos.client(Request(name, "", {}, method.rounds, 1)), seed)
    joined = method.state_of(model, sums_of(state) + own, seed)
    w, start, alone = (method.params_for(of, name) for of in (joined, state, method.state_of(model, own, seed)))
    return w, start, alone, joined


def _check_sums(experiment: Experiment, method: KeepsSums) -> None:
    """Refuse a newcomer if adding its sums does not give the model, or would be another private release.

    Raises:
        InputError: the message says why.
    """
    if experiment.privacy is not None and experiment.privacy.states_epsilon:
        raise InputError(
            "join: the run has [privacy], and no ledger would count the newcomer's release; run again with all"
        )
    if why := why_no_sum(experiment):
        raise InputError(f"join: the run keeps no sums over rows: {why}; run again with all")
    if not method.one_head:
        raise InputError(
            f"join: with these settings the result of {experiment.method_name} is not a head of the model, which a "
            "newcomer could keep; run again with all"
        )
    if not experiment.method.traits.independent_messages:
        raise InputError(
            "join: the class weights depend on the rows of all clients, so the others' sums would change; run again "
            "with all"
        )


def _free(run: Run, client: str | None) -> str:
    taken = {*run.manifest["clients"], *run.manifest.get("newcomers", {})}
    if client is None:
        return next(n for n in (NAME, *(f"{NAME}-{i}" for i in range(2, len(taken) + 3))) if n not in taken)
    if not client.strip():
        raise InputError('--client "": expected a name')
    if client in taken:
        raise InputError(f'--client "{client}": the run has a client of that name; give another')
    return client


def _check_kind(run: Run, population: Partitioned, data: str | Path) -> None:
    """Refuse rows whose kind or width differs from the run's, and a model that has changed."""
    table, shape = population.federated.table, run.manifest["model"]
    width = table.inputs.shape[1] if table.kind == "features" else None
    if (table.kind, width) != (shape["kind"], shape["feature_dim"]):
        of = f"{shape['kind']} with {shape['feature_dim']} values" if shape["feature_dim"] else shape["kind"]
        raise InputError(f"{data}: the rows are of another kind; the run expects {of}")
    check_same(run, population.model.fingerprints, "a newcomer needs the original model")


def _start(
    method: Method[Any], model: Model, state: Any, w_0: Params, name: str, adapt: Callable[[Params], Params]
) -> tuple[Params, dict[str, float]]:
    """(start weights, each client's fraction in them), if the method has both; else (the model of all clients, {}).

    Raises:
        InputError: the method has no start weights, and its clients do not share one model.
    """
    if isinstance(method, Joinable):
        return method.newcomer(model, state, w_0, name, adapt)
    shares_one = isinstance(method, TrainsLocally) and not predictions.personal(method)
    w = method.params_for(state, "") if shares_one else None
    if w is None or set(w) != set(model.names):
        raise InputError("join: this method has no start weights for a client that joins after training")
    return w, {}


def _passes(
    experiment: Experiment, population: Partitioned, memory: Path, name: str, w_0: Params
) -> tuple[Callable[[Params], Params], Callable[[Params], Params]]:
    """Two functions of w: a local training, and the client's own model.

    Each local training counts as one more round, so that it has its own random stream.
    """
    method = experiment.method
    silos = Silos(method, Aggregator(), population, memory=memory, seed=experiment.run.seed)
    count = 0

    def adapt(w: Params) -> Params:
        nonlocal count
        if not isinstance(method, TrainsLocally):
            raise InputError("join: this method has no client optimiser with which a newcomer could train")
        count += 1
        client = silos.client(Request(name, "", {}, method.rounds + count, 1))
        trained = any_rank.go_on(method.local, client, w, w_0)
        client.memory.commit()  # type: ignore[attr-defined]
        return trained

    def own(w: Params) -> Params:
        return predictions.own(method, silos.client(Request(name, "", {}, method.rounds + count, 2)), w)

    return adapt, own
