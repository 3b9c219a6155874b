"""Federate a module in memory, with a loss or as a Hugging Face Trainer, on this machine only.

Forked worker processes share data sets and module. For several sites write an experiment (docs/how-to/deployment.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedfm.api import execute
from fedfm.config.experiment import Experiment
from fedfm.config.registry import admit_named, resolve
from fedfm.core.client import POOLED
from fedfm.data.partition import deal, own_test
from fedfm.data.spec import IN_MEMORY, DataSpec
from fedfm.data.stratify import hold_out
from fedfm.data.table import ClientRows, FederatedData, Table
from fedfm.engines.local.engine import processes
from fedfm.errors import InputError
from fedfm.models.own.given import Given, Loss, Objective, Places
from fedfm.runtime.population import Partitioned
from fedfm.runtime.predictions import personal
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run
from fedfm.seeds import generator

if TYPE_CHECKING:
    from transformers import Trainer


def federate(
    model: nn.Module | Trainer,
    *,
    clients: Mapping[str, Any] | None = None,
    train: Any = None,
    partition: Mapping[str, Any] | None = None,
    test: Any = None,
    loss: Loss | None = None,
    objective: Objective | None = None,
    logits: Callable[[nn.Module, Any], Tensor] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    labels: str | None = None,
    classes: Sequence[str] = (),
    method: str = "fedavg",
    rounds: int | None = None,
    local: Mapping[str, Any] | None = None,
    val_fraction: float = 0.0,
    aggregation: str | Mapping[str, Any] = "mean",
    seed: int | None = None,
    out: str | Path | None = None,
    run: Mapping[str, Any] | None = None,
    name: str | None = None,
    progress: Progress | None = None,
    **keys: Any,
) -> dict[str, Any]:
    """Train a module over clients whose rows are in memory; afterwards it holds the trained weights.

    Trainable parameters travel (with PEFT the adapter's), and batch norm's running statistics. Data sets are map-style
    (``len(d)``, ``d[i]``); rows are tuples ``(input, ..., target)``, dicts, or tensors. Random transforms repeat with
    the seed if they use torch's generator.

    Args:
        model: a module on the device where it shall run, or a ``transformers.Trainer``, which brings module, loss, data
            collator, ``train_dataset``, ``eval_dataset`` (as ``test``) and the optimiser's arguments.
        clients: name -> data set. Or ``train`` and ``partition``.
        train: one data set, assigned to clients by ``partition``.
        partition: as ``data.partition`` of an experiment, e.g. ``{"name": "dirichlet", "alpha": 0.1, "clients": 10}``.
        test: one data set for all clients, or client -> data set.
        loss: (output, target) -> scalar mean over the batch, e.g. ``torch.nn.functional.cross_entropy``. Without it and
            ``objective`` the module returns its loss itself, as transformers' models do.
        objective: (module, batch) -> scalar, instead of ``loss``; ``collate`` makes the batch.
        logits: (module, batch) -> (b, C), with an ``objective``, to measure accuracy.
        collate: list of rows -> batch [torch's default_collate].
        labels: key of the target in rows that are dicts ["labels", else "label"].
        classes: names of the classes.
        method: name of a method; its own keys are further arguments, e.g. ``mu=0.01``.
        rounds: [the method's default].
        local: the client optimiser, as ``[method.local]``; a Trainer's arguments are its defaults.
        val_fraction: share of each client's rows for validation.
        aggregation: the rule's name, or as ``[aggregation]``, e.g. ``{"name": "trimmed_mean", "trim": 0.2}``.
        seed: every random stream derives from it [0, or the Trainer's].
        out: the run directory [``runs/<name>-<time>``]; a run of the same experiment in it continues.
        run: further keys of ``[run]``, e.g. ``{"workers": 2, "evaluate_every": 5}``.
        name: of the run.
        progress: receives the run's events, e.g. ``fedfm.cli.progress_bar.Bar()``.

    Returns:
        The result line, and ``models``: client -> folder of its model; one folder under "" if all share one. If every
        client has its own model, the module's weights stay as they were. There is an accuracy if rows have integer
        labels and the module returns one logit a class; else only the loss.

    Raises:
        InputError: an argument is wrong; raised before any training.
        RunError: the run cannot continue; call again with the same ``out``.

    Example:
        >>> x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
        >>> halves = {"north": list(zip(x[:20], y[:20])), "south": list(zip(x[20:], y[20:]))}
        >>> result = federate(nn.Linear(3, 2), clients=halves, loss=nn.functional.cross_entropy)  # doctest: +SKIP
    """
    given = Given(model, loss, objective, logits, collate, labels)
    if given.trainer is not None:
        train, test, local = given.data_and_optimiser(clients, train, test, local)
        seed = int(given.trainer.args.seed) if seed is None else seed
    admit_named({"method": {"name": method}})
    for key, value in keys.items():
        if isinstance(value, nn.Module):
            raise InputError(
                f"{key}: a module; expected a built-in name, a folder as save_pretrained writes it or a hub id"
            )
    if "local" not in {f.name for f in fields(resolve("methods", method))}:
        raise InputError(
            f'method = "{method}": it has no client optimiser that trains a module; federate takes methods that have '
            'one, such as "fedavg"; for other methods write an experiment'
        )
    settings = {"seed": seed or 0, **(run or {})}
    device = next((p.device for p in given.module.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        settings["workers"] = processes(settings.get("workers", 1), device)
    tables = {
        "data": {"name": IN_MEMORY, "partition": _partition(clients, train, partition), "val_fraction": val_fraction},
        "model": {"name": IN_MEMORY},
        "method": {
            "name": method,
            **({} if rounds is None else {"rounds": rounds}),
            "local": dict(local or {}),
            **keys,
        },
        "aggregation": {"name": aggregation} if isinstance(aggregation, str) else aggregation,
        "run": settings,
    }
    experiment = Experiment.from_dict(tables | {"name": name or f"{method.rpartition(':')[2]}-in-memory"}, imports=True)
    table, places = given.table(clients, train, test, experiment.data.partition.column)
    federated = _partitioned(table, places, experiment.data, experiment.run.seed)
    own_models = personal(experiment.method)
    with _restored(given.module), given.checkpointing():
        wrapped = given.wrapped(table, classes)
        federated = replace(federated, table=replace(table, classes=wrapped.classes))
        start = wrapped.params()
        try:
            current, fresh = _run_at(out, experiment)
            watcher = progress or Progress()
            result = execute.drive(current, watcher, fresh=fresh, population=lambda: Partitioned(federated, wrapped))
            if not own_models:
                w = experiment.method.params_for(current.state(experiment.method.state_type), "")
                if w.layout is not wrapped.layout:
                    raise InputError(f"{current.path} was trained with another model; give another out")
                start = w
        finally:
            wrapped.load(start)
    folders = sorted(federated.clients) if own_models else [""]
    return result | {"models": {c: str(current.adapter(c)) for c in folders}}


# --- rows ------------------------------------------------------------------------------------------------------------


def _partition(clients: Mapping[str, Any] | None, train: Any, partition: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The experiment's partition; clients with data sets of their own become a column of names."""
    if clients is None and train is None:
        raise InputError("clients: expected name -> data set, or train=data set with partition={...}")
    if clients is not None and (train is not None or partition is not None):
        raise InputError("clients: every data set is a client; drop train and partition")
    if clients is None:
        return {} if partition is None else partition
    if not isinstance(clients, Mapping) or not clients:
        raise InputError("clients: expected a dict of name -> data set")
    for name in clients:
        if not isinstance(name, str) or not name.strip() or name in ("server", POOLED):
            raise InputError(f"clients: {name!r} is not a client's name; expected text")
    return {"name": "by_column", "column": "client"}


def _partitioned(table: Table, places: Places, spec: DataSpec, seed: int) -> FederatedData:
    """Clients' rows: as given, or by the partition's rule."""
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


# --- the run ---------------------------------------------------------------------------------------------------------


def _run_at(out: str | Path | None, experiment: Experiment) -> tuple[Run, bool]:
    """(run, whether it is new); ``out`` may hold a run of this experiment."""
    if out is None or not (Path(out) / "manifest.json").exists():
        return Run.create(experiment, Path(out) if out else None), True
    run = Run.open(out)
    if run.experiment.to_dict() != experiment.to_dict():  # with the defaults of keys that an old run lacks
        raise InputError(f"{out} holds a run of another experiment; give another out")
    return run, False


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore training modes on exit; give parameters storage of their own and clear their gradients."""
    modes = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        for p in module.parameters():
            if p.requires_grad:
                p.data, p.grad = p.data.clone(), None
        for m, training in modes:
            m.training = training
