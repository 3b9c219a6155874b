"""Make a population: an experiment's rows and model, and each client's part of the rows."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.config.experiment import Experiment
from fedfm.core import storage, tasks
from fedfm.core.capabilities import HiddenModel, Needs, Planned, has
from fedfm.core.client import ClientId
from fedfm.core.libraries import refuse
from fedfm.core.method import Method
from fedfm.core.text import complain
from fedfm.data.spec import WITHHELD
from fedfm.data.table import Table
from fedfm.errors import InputError, NotWritten
from fedfm.models import devices
from fedfm.models.model import Model
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.row_cache import encodes
from fedfm.training import TrainsLocally, packed

if TYPE_CHECKING:
    from fedfm.training.sharded.settings import GroupSettings

_LOOK = 64  # number of training rows that are prepared to count the operations per row


def populate(experiment: Experiment, *, server: bool = False) -> Partitioned:
    """Read the data, partition them, and load the model.

    Args:
        server: whether this process is a server without clients. If so, it loads frozen weights only to score the
            model.

    Raises:
        InputError: the data or the model are invalid; the error names the key of the experiment or the place in a file.
    """
    from fedfm.data.load import load_table
    from fedfm.data.partition import deal

    if experiment.in_memory:
        raise InputError(
            "data and model of this run came from Python; call fedfm.federate(...) again with the same value of out"
        )
    if isinstance(experiment.method, HiddenModel) and experiment.model.name != WITHHELD:
        experiment.method.check_model()
    if experiment.own_code:
        from fedfm.runtime import user_population

        return user_population.of_experiment(experiment)
    seed = experiment.run.seed
    with refuse("data: a library cannot read these rows"):
        spec, base = experiment.model, tasks.trained_classes(experiment.model)
        table = load_table(experiment.data, seed=seed, task=spec.task, trained_classes=base)
        federated = deal(table, experiment.data, seed=seed)
    if spec.task is not None:
        from fedfm.runtime import keys_of_rows

        experiment, federated = keys_of_rows.add(experiment, federated)
    elif (owner := tasks.owner(table.kind)) is not None and owner.in_files:
        from fedfm.config import options

        options.check_method(experiment, owner)
    if experiment.model.name == WITHHELD:  # this process is a silo, and only the server has the model
        return Partitioned(federated, None)
    idle = server and not len(federated.test) and handles_parameters(experiment)
    group = None
    if experiment.run.processes_per_client > 1 and experiment.run.engine == "local":
        from fedfm.training.sharded.settings import PATIENCE, GroupSettings

        group = GroupSettings(experiment.run.processes_per_client, limit=PATIENCE * experiment.run.timeout)
    model = model_of(experiment, table, hollow=idle, group=group)
    clients, attack, attackers = sorted(federated.clients), experiment.attack, None
    if attack is not None:
        from fedfm.attacks.attackers import Attackers

        attack.fits(table.kind, model.task.name, model, table.classes)
        attackers = Attackers(attack, clients, seed, model.task.name)
    shared, augment = experiment.method.needs.model == "everybody", augmentation(experiment, table, model)
    return Partitioned(federated, model, attackers, shared=shared, augment=augment)


def handles_parameters(experiment: Experiment) -> bool:
    """Whether the server half declares that it needs only the model's parameters, and never runs the model."""
    method = experiment.method
    declared, keeps = method.traits.server_needs_weights_only, method.traits.keeps_foundation
    plain = isinstance(method, TrainsLocally) and not keeps and not isinstance(method, HiddenModel)
    return declared and plain and method.needs == Needs() and experiment.attack is None


def model_of(
    experiment: Experiment, table: Table, *, hollow: bool = False, group: GroupSettings | None = None
) -> Model:
    """Load the experiment's model for the rows of a table.

    Args:
        hollow: see :func:`fedfm.models.load.load_model`.
        group: the processes that compute the model; None if this process does.
    """
    if experiment.run.deterministic:
        devices.make_deterministic()
    spec = experiment.model
    about: dict[str, Any] = {"classes": table.classes, "kind": table.kind, "task": spec.task}
    about |= {"seed": experiment.run.seed, "head_bias": experiment.method.needs.bias}
    if group is not None:
        from fedfm.training.sharded.group_model import load_group_model

        group = replace(group, device=spec.device, deterministic=experiment.run.deterministic)
        return load_group_model(spec, group, **about)
    from fedfm.models.load import load_model

    model = load_model(spec, feature_dim=feature_dim(table), hollow=hollow, **about)
    model.kernels, model.loaders = experiment.run.kernels, experiment.run.loader_workers
    model.predictor = packed.predict
    return model


def augmentation(experiment: Experiment, table: Table, model: Model) -> tuple[str, ...]:
    """Return ``data.augment``, if clients train on images.

    Raises:
        InputError: clients do not train on images; the error gives the reason.
    """
    from fedfm.data.table import words_of

    names = experiment.data.augment
    if names and table.kind != "image":
        raise InputError(
            f"data.augment: it changes images, but {table.source} contains {words_of(table.kind)}; drop it"
        )
    if names and encodes(model):
        raise InputError(
            "data.augment: the frozen part of this model reads each image once, and training uses only its features; "
            'drop it, or train the part that reads images, e.g. model.adaptation.name = "lora"'
        )
    return names


def feature_dim(table: Table) -> int | None:
    """Return the width d of rows that are feature vectors (N, d); None for other rows."""
    return table.inputs.shape[1] if table.kind == "features" else None


def operations(method: Method[Any], population: Partitioned) -> dict[str, Any] | None:
    """Return the multiply-accumulates that the ledger states before the first round (see ``models.operations``).

    The result is None if the method has no client optimiser, or if only the user's own module can read the rows.
    """
    from fedfm.models.multiply_accumulates import Costs, per_sample

    table = population.federated.table
    if not isinstance(method, TrainsLocally) or method.needs.pooled or table.kind == "own":
        return None
    model, clients = population.model, (population.federated.clients[c] for c in population.clients)
    samples = list(population.sizes().values())
    first = next((rows.train[:_LOOK] for rows in clients if len(rows.train)), None)
    macs = None if first is None else per_sample(model, model.prepare(table, first), method.local.batch_size)
    if macs is None:
        return None
    costs = Costs.of(macs, method.passes if has(method, Planned, "passes") else method.local.passes, samples)
    return asdict(costs) | {"macs_per_client_round": costs.macs_per_client_round}


def record_error(folder: Path, client: ClientId, text: str) -> None:
    """Write a client's traceback to a file that only its owner can read; if the disk is full, print the last line."""
    try:
        storage.append(folder / "private" / "errors.log", f"--- {client}\n{text}\n")
    except NotWritten as error:
        last = text.rstrip().rpartition("\n")[2]
        complain(f"{error}: {client}: {last}")
