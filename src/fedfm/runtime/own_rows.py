"""Read rows and model of one client (a silo, or a client that joins) from the client's own files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfm.config.experiment import Experiment
from fedfm.config.user_code import is_function
from fedfm.core import tasks
from fedfm.core.open_settings import OpenSettings
from fedfm.core.text import listing, several
from fedfm.data.spec import WITHHELD, DataSpec
from fedfm.data.table import ClientRows, FederatedData, Table
from fedfm.errors import InputError
from fedfm.models.locate import BUILT_IN
from fedfm.models.spec import ModelSpec
from fedfm.runtime import keys_of_rows, row_sums, user_population
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.population import augmentation, model_of

if TYPE_CHECKING:
    from fedfm.training.sharded.settings import GroupSettings

_COLUMNS = ("text", "image", "label", "label_name", "split")  # keys of all tasks


@dataclass(frozen=True)
class OwnRows:
    """A client's own settings for its rows and models.

    Attributes:
        name: the client's name.
        data: file or folder of the client's rows; or the client's own "module:function", which returns rows and model.
        classes: names of the classes that the federation agreed on, in order; None means the classes of the rows.
        models: folders and hub ids that experiments may name in addition to the built-in models.
        device: the model's device; "" for the device in the experiment.
        predict: file or folder with rows to predict; "" for no predictions.
        processes: number of processes that compute the model together; None for the number in the experiment.
        launch: the command line that starts these processes; "" to start them on this machine.
        columns: names of the columns in the client's file, by key of the [data] table.
    """

    name: str
    data: str
    classes: tuple[str, ...] | None = None
    models: tuple[str, ...] = ()
    device: str = ""
    predict: str = ""
    processes: int | None = None
    launch: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)


def columns_of(settings: OpenSettings) -> dict[str, Any]:
    """The names of the columns in a [data] table or in a silo's file. Keys of single tasks are included if set."""
    return {key: getattr(settings, key) for key in (*_COLUMNS, *settings.added_keys())}


def deal(rows: OwnRows, spec: DataSpec, *, seed: int, task: str | None) -> FederatedData:
    """Read the silo's rows as a federation of one client; only scale and splits come from the experiment's [data]."""
    from fedfm.data.load import load_table
    from fedfm.data.partition import deal as dealt

    if is_function(rows.data):
        return user_population.of_silo(rows.name, rows.data, spec, seed).federated
    columns = rows.columns
    kept = {key: getattr(spec, key) for key in ("test_fraction", "val_fraction", "scale")}
    own = DataSpec(clients={rows.name: rows.data}, **columns, **kept)
    return dealt(load_table(own, seed=seed, task=task), own, seed=seed)


def listed_model(rows: OwnRows, spec: ModelSpec) -> ModelSpec:
    """Return the silo's own spec of the model that an experiment names: a built-in model, or one that the silo lists.

    If the model is a folder, only the last part of the path must agree, since the server has other paths. The server
    compares the fingerprints of the models.

    Raises:
        InputError: the silo does not list the model.
    """
    if spec.name == "features" or spec.name in BUILT_IN:
        return spec
    for model in rows.models:
        if spec.name == model or Path(spec.name).name == Path(model).name:
            return replace(spec, name=model)
    known = listing(rows.models) if rows.models else "none"
    raise InputError(f'model.name = "{spec.name}": this silo\'s file does not list this model; it lists {known}')


def populate(rows: OwnRows, experiment: Experiment, classes: Sequence[str]) -> Partitioned:
    """Load the silo's rows and one of its listed models, for the server's classes.

    Raises:
        InputError: the experiment's model, classes or task do not match the rows.
    """
    if experiment.method.traits.predicts_only:
        return Partitioned(_to_predict(rows, tuple(classes)), None)
    if experiment.own_code or is_function(rows.data):
        return _own(rows, experiment, tuple(classes))
    row_sums.check_silos(experiment)
    federated = deal(rows, experiment.data, seed=experiment.run.seed, task=experiment.model.task)
    keys_of_rows.add(experiment, replace(federated, clients={}))  # checks the keys; one silo's rows set none
    table = _with_classes(rows, federated.table, tuple(classes), experiment.model.task)
    model, augment = None, tuple[str, ...]()
    if experiment.model.name != WITHHELD:
        spec = listed_model(rows, experiment.model)
        here = replace(spec, device=rows.device or spec.device)
        group = _group(rows, experiment)
        model = model_of(replace(experiment, model=here), table, group=group)
        if group is not None:
            from fedfm.training.sharded.group_model import begin

            begin(model)  # what does not fit is refused before the silo agrees to the run
        augment = augmentation(experiment, table, model)
    return Partitioned(replace(federated, table=table), model, augment=augment)


def _group(rows: OwnRows, experiment: Experiment) -> GroupSettings | None:
    """The group of processes that computes the model; None for one process.

    Raises:
        InputError: the experiment asks for more processes, or cannot be computed by several.
    """
    asked = experiment.run.processes_per_client
    processes = asked if rows.processes is None else rows.processes
    if processes < asked:
        raise InputError(f"run.processes_per_client = {asked}: this silo's file has processes = {processes}")
    if processes == 1:
        return None
    from fedfm.config.processes import check
    from fedfm.training.sharded.settings import PATIENCE, GroupSettings

    check(experiment, "processes")
    return GroupSettings(processes, rows.launch, PATIENCE * experiment.run.timeout, "processes")


def _own(rows: OwnRows, experiment: Experiment, classes: tuple[str, ...]) -> Partitioned:
    """Return the PyTorch module and the rows from the silo's own function; the server's function is never imported."""
    if not (experiment.own_code and is_function(rows.data)):
        has, wants = ("a file", "a function") if experiment.own_code else ("a function", "a file or folder")
        raise InputError(
            f'data = "{rows.data}" is {has}, but this experiment (model.name = "{experiment.model.name}") needs '
            f"{wants} of the silo's own"
        )
    found = user_population.of_silo(rows.name, rows.data, experiment.data, experiment.run.seed)
    table = _with_classes(rows, found.federated.table, classes)
    return Partitioned(replace(found.federated, table=table), found.model_or_none)


def _to_predict(rows: OwnRows, classes: tuple[str, ...]) -> FederatedData:
    """Read the rows for which the silo wants predictions; they become the test rows of one client.

    Raises:
        InputError: the silo's file names no rows to predict.
    """
    if not rows.predict:
        raise InputError(
            "the run predicts, but this silo's file names no rows to predict; set predict to a file or folder"
        )
    from fedfm.data.rows_to_predict import read_inputs

    columns = DataSpec(path=rows.predict, **rows.columns)
    # Only the server's hello says what its model reads; the method compares the rows with it.
    table = replace(read_inputs(rows.predict, columns, kind=None), classes=classes)
    none, every = np.arange(0), np.arange(len(table))
    return FederatedData(table, {rows.name: ClientRows(none, none, every)}, every)


def _with_classes(rows: OwnRows, table: Table, classes: tuple[str, ...], task: str | None = None) -> Table:
    """Return the rows, with labels and targets in the order of ``classes``; refuse classes not agreed to."""
    known = classes_of(rows, table, task)
    if classes != known:
        words = several(tasks.class_word(table.kind, task))
        raise InputError(
            f"the server's {words} are {listing(classes, 20)}, but this silo's are {listing(known, 20)}; if the silos "
            f"agreed on the server's {words}, write them into silo.toml as classes = [...], in this order"
        )
    if table.classes == known:
        return table
    labels, targets, code = table.labels, table.targets, {name: index for index, name in enumerate(known)}
    if labels is not None:
        labels = np.array([code[name] for name in table.classes], dtype=np.int64)[labels]
    if targets is not None:
        from fedfm.data.client_files import reorder_targets

        targets = reorder_targets(targets, table.classes, code)
    return replace(table, labels=labels, targets=targets, classes=known)


def classes_of(rows: OwnRows, table: Table, task: str | None) -> tuple[str, ...]:
    """Return the federation's classes from the silo's file, or else the classes of the silo's rows.

    Raises:
        InputError: rows have further classes, or lack a target that the task needs in every row.
    """
    known = table.classes if rows.classes is None or not table.classes else rows.classes
    if unknown := [name for name in table.classes if name not in known]:
        word = tasks.class_word(table.kind, task)
        raise InputError(f"{rows.data}: rows of {word} {listing(unknown, 8)}, which is not in classes")
    named = tasks.task_named(task)
    absent = [name for name in known if name not in table.classes]
    if absent and table.targets is not None and named is not None and named.absent_target is None:
        raise InputError(f"{rows.data}: rows have no target {listing(absent, 8)}, which is in classes")
    return known
