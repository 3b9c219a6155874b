"""Make the population of a run whose module and rows come from a Python function of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedfm.config.user_code import function
from fedfm.data.owners import own_test
from fedfm.data.partition import deal
from fedfm.data.spec import DataSpec, PartitionSpec
from fedfm.data.stratify import hold_out
from fedfm.data.table import ClientRows, FederatedData, Table
from fedfm.errors import InputError, quote_names
from fedfm.models.user.function_calls import call
from fedfm.models.user.user_inputs import UserInputs, read_inputs
from fedfm.models.user.user_module import Places
from fedfm.runtime.partitioned import Partitioned
from fedfm.seeds import generator
from fedfm.training import packed

if TYPE_CHECKING:
    from fedfm.config.experiment import Experiment


START = "checkpoint/start.safetensors"  # the module's parameters before a run of ``fedfm.federate``, for audits


def of_experiment(experiment: Experiment) -> Partitioned:
    """Make the population of an experiment whose ``data.name`` and ``model.name`` name a user's function.

    Raises:
        InputError: the function is not allowed, it fails, or its return value is invalid.
    """
    name = str(experiment.data.name)
    return of_inputs(load_inputs(experiment), experiment.data, experiment.run.seed, name)


def load_inputs(experiment: Experiment) -> UserInputs:
    """Call the experiment's function and return its result."""
    name = str(experiment.data.name)
    try:
        return read_inputs(call(function(name, "data.name"), name, experiment.run.seed))
    except InputError as error:
        raise InputError(f"data.name: {name}: {error}") from None


def of_silo(silo: str, name: str, spec: DataSpec, seed: int) -> Partitioned:
    """Make one silo's population: its own function returns ``train``, or ``clients`` with an entry for the silo.

    Raises:
        InputError: for the reasons of :func:`of_experiment`, or if the function returns no rows of this silo.
    """
    try:
        user_inputs = read_inputs(call(function(name, "data"), name, seed))
        rows = user_inputs.train if user_inputs.clients is None else user_inputs.clients.get(silo)
        if rows is None:
            raise InputError(
                f"the function's clients are {quote_names(map(str, user_inputs.clients or ()))}, but this silo is "
                f"{silo}"
            )
        own = user_inputs.test.get(silo) if isinstance(user_inputs.test, Mapping) else user_inputs.test
        return of_inputs(replace(user_inputs, clients={silo: rows}, train=None, test=own), spec, seed)
    except InputError as error:
        raise InputError(f"data: {name}: {error}") from None


def of_inputs(user_inputs: UserInputs, spec: DataSpec, seed: int, name: str = "") -> Partitioned:
    """Make a population from module and rows; clients with their own data sets need no partition.

    Args:
        name: name of the function that returned module and rows.

    Raises:
        InputError: module, loss, rows and partition do not match.
    """
    if name and user_inputs.clients is not None and spec.partition != PartitionSpec():
        raise InputError(f"data.partition: {name} returns clients with their own rows; drop data.partition")
    table, places = user_inputs.given.table(
        user_inputs.clients, user_inputs.train, user_inputs.test, spec.partition.column
    )
    federated = partition(table, places, spec, seed)
    model = user_inputs.given.wrap(table, user_inputs.classes)
    model.predictor = packed.predict
    return Partitioned(replace(federated, table=replace(table, classes=model.classes)), model)


def partition(table: Table, places: Places, spec: DataSpec, seed: int) -> FederatedData:
    """Return each client's rows, as the function returns them or as the partition's rule assigns them."""
    if ("train", "") in places:
        return deal(table, spec, seed=seed)
    names = [client for split, client in places if split == "train"]
    train, test = table.rows("train"), table.rows("test")
    if ("test", "") not in places:
        own = {c: places.get(("test", c), np.zeros(0, dtype=np.int64)) for c in names}
    elif table.labels is None:
        own = {c: np.zeros(0, dtype=np.int64) for c in names}
    else:
        owner = np.concatenate([np.full(len(places["train", c]), k) for k, c in enumerate(names)])
        who = own_test(table, test, train, owner, len(names), seed)
        own = {c: test[who == k] for k, c in enumerate(names)}
    clients = {}
    for c in names:
        mine = places["train", c]
        held = hold_out(
            None if table.labels is None else table.labels[mine], mine, spec.val_fraction, generator(seed, "val", c)
        )
        clients[c] = ClientRows(np.setdiff1d(mine, held), np.sort(held), own[c])
    return FederatedData(table, clients, test, table.notices)
