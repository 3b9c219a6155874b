"""A user's inputs to a run from Python: a Trainer, or a dict with the module, its loss and its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfm.core.client import POOLED
from fedfm.errors import InputError, close, quote_names
from fedfm.models.user.user_module import Given

OF_MODULE = ("loss", "objective", "logits", "collate", "labels")
KEYS = ("model", "clients", "train", "test", "classes", *OF_MODULE)  # arguments of fedfm.federate


@dataclass(frozen=True)
class UserInputs:
    """Module, loss and rows, under the names of the arguments of :func:`fedfm.federate`.

    Attributes:
        local: ``[method.local]`` from a Trainer's arguments; empty for a module.
        seed: the Trainer's seed; None for a module.
    """

    given: Given
    clients: Mapping[str, Any] | None
    train: Any
    test: Any
    classes: Sequence[str]
    local: Mapping[str, Any]
    seed: int | None


def read_inputs(what: Any, local: Mapping[str, Any] | None = None, *, rows: bool = True) -> UserInputs:
    """Read a Trainer, a module or a dict with the keys :data:`KEYS`.

    Args:
        local: keys of ``[method.local]`` that override a Trainer's arguments.
        rows: whether training rows are required.

    Raises:
        InputError: a key or a value is wrong.
    """
    table = dict(what) if isinstance(what, Mapping) else {"model": what}
    if unknown := sorted(map(str, table.keys() - set(KEYS))):
        raise InputError(f"{unknown[0]}: unknown key; expected {quote_names(KEYS)}{close(unknown[0], KEYS)}")
    if "model" not in table:
        raise InputError(f"model: missing; expected a transformers.Trainer, or a dict of {quote_names(KEYS)}")
    given = Given(table["model"], *(table.get(key) for key in OF_MODULE))
    clients, train, test = table.get("clients"), table.get("train"), table.get("test")
    settings, seed = dict(local or {}), None
    if given.trainer is not None:
        seed = int(given.trainer.args.seed)
        if rows or clients is not None or train is not None or given.trainer.train_dataset is not None:
            train, test, settings = given.data_and_optimiser(clients, train, test, local)
    if rows and clients is None and train is None:
        raise InputError("clients: expected name -> data set, or train=data set with a partition")
    if clients is not None:
        _check_names(clients)
        if train is not None:
            raise InputError("clients: every data set is a client; drop train and partition")
    return UserInputs(given, clients, train, test, tuple(table.get("classes") or ()), settings, seed)


def _check_names(clients: Any) -> None:
    if not isinstance(clients, Mapping) or not clients:
        raise InputError("clients: expected a dict of name -> data set")
    for name in clients:
        if not isinstance(name, str) or not name.strip() or name in ("server", POOLED):
            raise InputError(f"clients: {name!r} is not a client's name; expected text")
