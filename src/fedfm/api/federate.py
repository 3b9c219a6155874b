"""Federate a module in memory, on this machine only. The module comes with a loss, or in a Hugging Face Trainer.

Forked worker processes share data sets and module. For several sites, write an experiment (docs/how-to/deployment.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedfm.api import execute
from fedfm.config.experiment import Experiment
from fedfm.config.registry import admit_named, resolve
from fedfm.core import storage
from fedfm.data.spec import IN_MEMORY
from fedfm.engines.local.engine import processes
from fedfm.errors import InputError
from fedfm.models.user.user_inputs import read_inputs
from fedfm.models.user.user_module import Given, Loss, Objective
from fedfm.runtime.predictions import personal
from fedfm.runtime.progress import Progress
from fedfm.runtime.progress_bar import Bar
from fedfm.runtime.result_match import final_state
from fedfm.runtime.resume_changes import extend
from fedfm.runtime.run_directory import Run
from fedfm.runtime.user_population import START, of_inputs

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
    """Train a module over clients whose rows are in memory. Afterwards the module has the trained weights.

    Messages contain the trainable parameters (with PEFT those of the adapter) and batch norm's running statistics. Data
    sets are map-style (``len(d)``, ``d[i]``). Rows are tuples ``(input, ..., target)``, dicts, or tensors. Random
    transforms give the same results with the same seed if they use torch's generator.

    Args:
        model: a module on the device where it should run, or a ``transformers.Trainer``, which has module, loss, data
            collator, ``train_dataset``, ``eval_dataset`` (as ``test``) and the optimiser's arguments.
        clients: the data set of each client by name; or give ``train`` with ``partition`` instead.
        train: one data set, whose rows ``partition`` assigns to clients.
        partition: as ``data.partition`` in an experiment, e.g. ``{"name": "dirichlet", "alpha": 0.1, "clients": 10}``.
        test: one data set for all clients, or one for each client by name.
        loss: (output, target) -> scalar mean over the batch, e.g. ``torch.nn.functional.cross_entropy``. If there is
            neither ``loss`` nor ``objective``, the module must return its loss, as transformers' models do.
        objective: (module, batch) -> scalar, in place of ``loss``; ``collate`` makes the batch.
        logits: (module, batch) -> logits (b, C), from which the accuracy is measured if there is an ``objective``.
        collate: list of rows -> batch [torch's default_collate].
        labels: key of the target in rows that are dicts ["labels", or else "label"].
        classes: names of the classes.
        method: name of a method; its own keys are further arguments, e.g. ``mu=0.01``.
        rounds: number of rounds [the method's default].
        local: the client optimiser, as ``[method.local]``; a Trainer's arguments are its defaults.
        val_fraction: fraction of each client's rows for validation.
        aggregation: the rule's name, or as ``[aggregation]``, e.g. ``{"name": "trimmed_mean", "trim": 0.2}``.
        seed: determines every random stream [0, or the Trainer's].
        out: the run directory [``runs/<name>-<time>``]. If it contains a run of the same experiment, this run
            continues, also with more ``rounds`` than before.
        run: further keys of ``[run]``, e.g. ``{"workers": 2, "evaluate_every": 5}``.
        name: name of the run.
        progress: receives the run's events; by default a bar on stderr, ``fedfm.Progress()`` is silent.

    Returns:
        The result, and ``models``: the folder of each client's model, or one folder under "" if all clients share one.
        If every client has its own model, the module's weights stay as they were. There is an accuracy if rows have
        integer labels and the module returns one logit per class; otherwise there is only the loss.
        For a Trainer's ``compute_metrics``, ``details`` has its values: ``metrics`` and, by client, ``client_metrics``.

    Raises:
        InputError: an argument is invalid; this is raised before any training.
        RunError: the run cannot continue; call again with the same ``out`` to continue later.

    Example:
        >>> x, y = torch.randn(40, 3), torch.randint(0, 2, (40,))
        >>> halves = {"north": list(zip(x[:20], y[:20])), "south": list(zip(x[20:], y[20:]))}
        >>> result = federate(nn.Linear(3, 2), clients=halves, loss=nn.functional.cross_entropy)  # doctest: +SKIP
    """
    inputs: dict[str, Any] = {
        "loss": loss,
        "objective": objective,
        "logits": logits,
        "collate": collate,
        "labels": labels,
    }
    inputs |= {"model": model, "clients": clients, "train": train, "test": test, "classes": classes}
    user_inputs = read_inputs(inputs, local)
    given = user_inputs.given
    admit_named({"method": {"name": method}})
    for key, value in keys.items():
        if isinstance(value, nn.Module):
            raise InputError(
                f"{key}: this is a module; expected a built-in name, a folder as save_pretrained writes it or a hub id"
            )
    if "local" not in {f.name for f in fields(resolve("methods", method))}:
        raise InputError(
            f'method = "{method}" has no client optimiser that trains a module; federate takes methods that have '
            'one, such as "fedavg"; for other methods write an experiment'
        )
    settings = {"seed": (user_inputs.seed or 0) if seed is None else seed, **(run or {})}
    device = next((p.device for p in given.module.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        settings["workers"] = processes(settings.get("workers", 1), device)
    tables = {
        "data": {
            "name": IN_MEMORY,
            "partition": _partition(clients, partition),
            "val_fraction": val_fraction,
        },
        "model": {"name": IN_MEMORY},
        "method": {
            "name": method,
            **({} if rounds is None else {"rounds": rounds}),
            "local": dict(user_inputs.local),
            **keys,
        },
        "aggregation": {"name": aggregation} if isinstance(aggregation, str) else aggregation,
        "run": settings,
    }
    experiment = Experiment.from_dict(tables | {"name": name or f"{method.rpartition(':')[2]}-in-memory"}, imports=True)
    own_models = personal(experiment.method)
    with _restore_module(given):
        population = of_inputs(user_inputs, experiment.data, experiment.run.seed)
        wrapped = population.model
        start = wrapped.params()
        try:
            current, fresh = _run_at(out, experiment)
            more = experiment.method.rounds > current.experiment.method.rounds
            with current.lock() if fresh or more else contextlib.nullcontext():
                if fresh:
                    storage.save(current.path / START, {"w": start})
                elif more:
                    extend(current, experiment.method.rounds)
                watcher = progress or Bar()
                result = execute.drive(current, watcher, fresh=fresh, population=lambda: population)
            if not own_models:
                w = experiment.method.params_for(final_state(current, experiment.method.state_type), "")
                if w.layout is not wrapped.layout:
                    raise InputError(f"{current.path} was trained with another model; give another out")
                start = w
        finally:
            wrapped.load(start)
    folders = population.clients if own_models else [""]
    return result | {"models": {c: str(current.adapter(c)) for c in folders}}


# --- rows ------------------------------------------------------------------------------------------------------------


def _partition(clients: Mapping[str, Any] | None, partition: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The experiment's partition. Clients with their own data sets become a column of names."""
    if clients is None:
        return {} if partition is None else partition
    if partition is not None:
        raise InputError("clients: each data set is a client already; drop partition")
    return {"name": "by_column", "column": "client"}


# --- the run ---------------------------------------------------------------------------------------------------------


def _run_at(out: str | Path | None, experiment: Experiment) -> tuple[Run, bool]:
    """The run, and whether it is new; ``out`` may contain a run of this experiment."""
    if out is None or not (Path(out) / "manifest.json").exists():
        return Run.create(experiment, Path(out) if out else None), True
    run = Run.open(out)
    old, new = run.experiment.to_dict(), experiment.to_dict()  # to_dict() fills in keys that an old run lacks
    more = experiment.method.rounds > run.experiment.method.rounds
    if more:
        old |= {"method": old["method"] | {"rounds": experiment.method.rounds}}
    if old != new:
        raise InputError(f"{out} contains a run of another experiment; give another out")
    return run, False


@contextlib.contextmanager
def _restore_module(given: Given) -> Iterator[None]:
    """Context manager: restore training modes on exit; give parameters their own storage, and clear their gradients."""
    module = given.module
    modes = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        given.end()
        for p in module.parameters():
            if p.requires_grad:
                p.data, p.grad = p.data.clone(), None
        for m, training in modes:
            m.training = training
