"""Rules on keys that few experiments set: tasks, coded transport, user functions, augmentation, early ends, attacks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, get_type_hints

from fedfm.attacks.attack import halves_of, locals_of
from fedfm.config.parts import ExperimentParts
from fedfm.config.registry import name_of
from fedfm.core import tasks
from fedfm.core.capabilities import Private
from fedfm.core.client import Update
from fedfm.core.method import Method, nested_methods
from fedfm.errors import InputError, quote_names
from fedfm.linalg.params import Params
from fedfm.linalg.precisions import EXACT
from fedfm.training import Local

if TYPE_CHECKING:
    from fedfm.core.task_facts import TaskFacts

_OWN_DATA = ("name", "partition", "val_fraction")  # keys of [data] that apply to rows from a user's function


def check_momentum(local: Local) -> None:
    """Refuse a momentum if the client optimiser has none.

    Raises:
        InputError: the momentum is set.
    """
    from fedfm.training.personal import TwoModels

    if isinstance(local, TwoModels) and local.momentum and local.optimiser != "sgd":
        raise InputError(
            f'method.local.momentum: only optimiser = "sgd" has one, not "{local.optimiser}"',
            key="method.local.momentum",
        )


def check_task(e: ExperimentParts) -> None:
    """Check rules on the task that an experiment names.

    Raises:
        InputError: the task reads no list of columns; the method needs one class a row; the task needs validation rows
            that no party has, or scores that [privacy] does not cover; or it needs the training rows of all clients.
    """
    named = tasks.task_named(e.model.task)
    for key in tasks.lists_columns(e.data):
        readers = [of for of in tasks.available() if key in {column.key for column in of.columns}]
        if named is None or named.name not in {of.name for of in readers}:
            whose = " or ".join(f'model.task = "{of}"' for of in readers)
            raise InputError(f"data.{key}: no column of this list is read without {whose}; set it", key=f"data.{key}")
    if named is None:
        if e.data.kind is not None:
            check_method(e, tasks.implied_task(e.data.kind))
        return
    if e.data.classes is not None and e.data.kind not in named.table_kinds:
        kinds = f'task "{named.name}" reads rows of kind {quote_names(named.table_kinds)}'
        raise InputError(f'data.kind = "{e.data.kind}": {kinds}', key="data.kind")
    if key := named.of(e.model).needs_validation:
        if e.privacy is not None:
            raise InputError(f"{key}: [privacy] does not cover scores on validation rows; give a number")
        if e.data.classes is not None and not e.data.val_fraction:
            raise InputError(f"{key} needs validation rows; set data.val_fraction, e.g. 0.1", key="data.val_fraction")
    check_method(e, named)
    if (needed := named.of(e.model).reads_all_rows) is None:
        return
    what, cure = needed
    if (e.run.engine == "folder" or e.data.classes is not None) and e.aggregation.transport.form != "plain":
        raise InputError(f"{what}, and secure aggregation would not hide the silos' sums: {cure}", key="model.task")
    if e.privacy is not None and e.privacy.states_epsilon:
        raise InputError(f"{what}, without noise, so that [privacy] would not cover it: {cure}", key="model.task")


def check_method(e: ExperimentParts, task: TaskFacts) -> None:
    """Refuse a method that does not take the task, which the experiment names or its rows imply.

    Raises:
        InputError: the method or its noise needs one class a row, or the method needs one vector of targets a row; the
            message names the tasks that it takes.
    """
    needs, method = e.method.needs, f'method "{e.method_name}"'
    covered = isinstance(e.method, Private) and e.privacy is not None and e.privacy.states_epsilon
    if (needs.one_class or covered) and not task.one_class_a_row:
        whose = (needs.because or method) if needs.one_class else f"[privacy] of {method}"
        takes = quote_names(tasks.names(lambda of: of.one_class_a_row))
        raise InputError(
            f'{whose} computes with the class of each row, and rows of task "{task.name}" have no '
            f"single class: the method takes the tasks {takes} only; use a method that trains the model, such as "
            "fedavg",
            key="method.name",
        )
    if needs.row_targets and not _has_row_targets(task):
        raise InputError(
            f'{method} fits a linear head to one vector of targets per row, and rows of task "{task.name}" have none: '
            f"the method takes the tasks {quote_names(tasks.names(_has_row_targets))} only; use a method that trains "
            "the model, such as fedavg",
            key="method.name",
        )


def _has_row_targets(task: TaskFacts) -> bool:
    return task.linear_head and (task.one_class_a_row or task.own_targets)


def check_transport(e: ExperimentParts, method: str) -> None:
    """Refuse ``run.transport`` if rounding would break a guarantee, or if no trained values are sent."""
    from fedfm.aggregation.secure import Secure
    from fedfm.training.fit_head import HeadSpec

    where, halves = f'run.transport = "{e.run.transport}":', halves_of(e.method)
    if isinstance(e.aggregation, Secure):
        raise InputError(
            f"{where} secure aggregation codes updates itself, as whole numbers that add up; drop one",
            key="run.transport",
        )
    if e.privacy is not None:
        raise InputError(
            f"{where} [privacy] bounds the exact update of a client, and rounding may exceed it; drop one",
            key="run.transport",
        )
    if (own := vars(e.method).get("transport", EXACT)) != EXACT:
        raise InputError(
            f'{where} method.transport = "{own}" already encodes what {method} sends; drop one', key="run.transport"
        )
    if e.method.needs.model == "server":
        raise InputError(
            f"{where} {method} sends ciphertexts, and no bit of them may change; drop it", key="run.transport"
        )
    if e.method.needs.pooled:
        raise InputError(
            f"{where} {method} pools all rows in one place and sends nothing; drop it", key="run.transport"
        )
    statistics = not locals_of(e.method) and not any(isinstance(v, HeadSpec) for v in vars(e.method).values())
    if statistics or not any({Params, Update} & set(get_type_hints(half).values()) for half in halves):
        raise InputError(
            f"{where} {method} sends statistics or predictions, and no trained values; drop it", key="run.transport"
        )


def check_own_code(e: ExperimentParts, method: str) -> None:
    """Refuse keys that make no sense if a user's function provides rows and model, or the model alone.

    Raises:
        InputError: there is such a key; the message names the first one.
    """
    task = tasks.task_named(e.model.task)
    if not e.own_code and task is not None and task.own_modules:
        return
    if e.data.name != e.model.name:
        alone = quote_names(tasks.names(lambda of: of.own_modules))
        raise InputError(
            f'data.name = "{e.data.name or ""}", model.name = "{e.model.name}": one function provides rows and model; '
            f"expected the same name twice, or, for a function that provides only the model, model.task = {alone}",
            key="data.name",
        )
    specs: tuple[tuple[str, Any, tuple[str, ...]], ...] = (("data", e.data, _OWN_DATA), ("model", e.model, ("name",)))
    for where, spec, used in specs:
        plain = type(spec)()
        for f in dataclasses.fields(spec):
            if f.name not in used and getattr(spec, f.name) != getattr(plain, f.name):
                raise InputError(
                    f"{where}.{f.name}: {e.data.name} provides rows and model as they are; drop it",
                    key=f"{where}.{f.name}",
                )
    if "local" not in {f.name for f in dataclasses.fields(e.method)}:
        raise InputError(
            f'{method} has no client optimiser that trains a module; expected a method that has one, e.g. "fedavg"',
            key="method.name",
        )


def check_augmented(e: ExperimentParts, method: str) -> None:
    """Refuse ``data.augment`` if no training would see the changed images, or if clients train by DP-SGD.

    Raises:
        InputError: augmentation does not work here; the message gives the reason.
    """
    adaptation = e.model.adaptation
    if e.in_memory:
        raise InputError(
            "data.augment: with rows from Python, your data set changes its images; drop it", key="data.augment"
        )
    if adaptation is not None and adaptation.name in ("head", "side_adapter", "prompt"):
        raise InputError(
            f'data.augment: with model.adaptation.name = "{adaptation.name}" the frozen backbone reads each image '
            'once, and training uses its features; drop it, or train a part that reads images, e.g. "lora"',
            key="data.augment",
        )
    if not all(m.traits.rows_by_optimiser for m in _all(e.method)):
        raise InputError(
            f"data.augment: the clients of {method} read their images outside the local optimiser, too, and would see "
            "them unchanged; drop it, or take a method whose clients read rows only there, e.g. fedavg",
            key="data.augment",
        )
    if e.privacy is not None and e.privacy.mechanism == "dp_sgd":
        raise InputError(
            "data.augment: DP-SGD bounds one gradient of each unchanged row; drop one of the two", key="data.augment"
        )


def _all(method: Method[Any]) -> tuple[Method[Any], ...]:
    """The method, and the methods in its fields."""
    return (method, *nested_methods(method))


def check_early_end(e: ExperimentParts, method: str) -> None:
    """Refuse early stopping without its validation rows, and any early end that would leave the model incomplete.

    Raises:
        InputError: a rule is broken.
    """
    run = e.run
    if run.patience and e.privacy is not None:
        raise InputError(
            "run.patience: [privacy] does not cover validation losses of single clients; drop one of the two",
            key="run.patience",
        )
    if run.patience and not e.data.val_fraction:
        raise InputError(
            "run.patience: early stopping needs validation rows; set data.val_fraction, e.g. 0.1", key="run.patience"
        )
    if run.patience and not run.evaluate_every:
        raise InputError(
            "run.patience: early stopping evaluates during the run, and run.evaluate_every = 0 does not",
            key="run.patience",
        )
    early = {"run.patience": run.patience, "privacy.halt_at_epsilon": getattr(e.privacy, "halt_at_epsilon", None)}
    for key in (key for key, value in early.items() if value and e.method.traits.last_round_differs):
        raise InputError(
            f"{key}: {method} completes its model in the last round, which an early end would skip; drop it", key=key
        )


def check_folder(e: ExperimentParts, method: str) -> None:
    """Refuse settings that do not work on the folder engine, and this engine's keys on other engines.

    Raises:
        InputError: a rule is broken.
    """
    run = e.run
    if run.engine != "folder":
        for key in ("folder", "roster", "identity"):
            if getattr(run, key) is not None:
                raise InputError(f'run.{key}: only engine = "folder" takes it, not "{run.engine}"', key=f"run.{key}")
        return
    if run.folder is None:
        raise InputError('run.folder: engine = "folder" needs the folder for the messages', key="run.folder")
    if run.roster is None:
        raise InputError(
            "run.roster: a file with the silos' public keys is needed; `fedfm silo check` prints each one",
            key="run.roster",
        )
    if e.attack is not None:
        raise InputError(
            f'[attack]: {method} on engine = "folder" has real silos, which do not attack; drop it',
            key="attack",
        )


def check_attack(e: ExperimentParts, method: str) -> None:
    """Refuse an attack that no client of this method can carry out.

    Raises:
        InputError: a rule is broken.
    """
    attack: Any = e.attack
    if e.in_memory or e.own_code:
        raise InputError("[attack]: rows that were given from Python cannot be attacked; drop it", key="attack")
    halves, needs = halves_of(e.method), e.method.needs
    if needs.model == "server":
        raise InputError(
            f"[attack]: the clients of {method} have no model, and attacks act on rows and updates of clients that "
            "have one; drop it",
            key="attack",
        )
    if not e.method.rounds or needs.pooled or not halves:
        raise InputError(f"[attack]: {method} has no client that trains, so none can attack; drop it", key="attack")
    if attack.needs == "update" and all(get_type_hints(fn).get("return") is not Update for fn in halves):
        raise InputError(
            f'attack.name = "{name_of("attacks", attack)}": the clients of {method} send no updates; '
            'expected "label_shuffle"',
            key="attack.name",
        )
    if attack.needs == "epochs" and not locals_of(e.method):
        raise InputError(
            f"attack.intensity = {attack.intensity}: {method} has no [method.local] whose epochs it could "
            "multiply; expected 1",
            key="attack.intensity",
        )
