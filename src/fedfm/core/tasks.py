"""The tasks by name: one for each file of ``fedfm/tasks``.

Packages that tasks import cannot import the tasks, so they read a task's properties here. This module finds the tasks
in their folder and names none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fedfm.core.fields import key_of, setting, types_of
from fedfm.core.row_kinds import Column, RowKind
from fedfm.errors import InputError, close, quote_names

if TYPE_CHECKING:
    from fedfm.core.task_facts import TaskFacts

_FOLDER = "tasks"
_PROTOCOL = f"fedfm.{_FOLDER}.task"


@functools.cache
def _all() -> tuple[TaskFacts, ...]:
    """All tasks, including those that experiment files cannot name, sorted by name with the default first."""
    base: type[TaskFacts] = import_module(_PROTOCOL).Task
    names = (entry.name.removesuffix(".py") for entry in files("fedfm").joinpath(_FOLDER).iterdir())
    found: list[TaskFacts] = []
    for name in sorted(name for name in names if not name.startswith("_") and name.isidentifier()):
        module = import_module(f"fedfm.{_FOLDER}.{name}")
        found += [
            cls()
            for cls in vars(module).values()
            if isinstance(cls, type) and issubclass(cls, base) and cls is not base and cls.__module__ == module.__name__
        ]
    return tuple(sorted(found, key=lambda task: (not task.default, task.name)))


@functools.cache
def available() -> tuple[TaskFacts, ...]:
    """The tasks that an experiment file may name, the default first."""
    return tuple(task for task in _all() if task.in_files)


def names(that: Callable[[TaskFacts], bool] = lambda task: True) -> tuple[str, ...]:
    """Names of the tasks that an experiment file may name, and for which ``that`` holds.

    Example:
        >>> names(lambda task: task.two_encoders)
        ('zero_shot',)
    """
    return tuple(task.name for task in available() if that(task))


def find(name: str | TaskFacts) -> TaskFacts:
    """The task of this name, with the defaults of its keys; a task itself is returned unchanged.

    Raises:
        InputError: there is no such task.
    """
    if not isinstance(name, str):
        return name
    for task in _all():
        if task.name == name:
            return task
    raise InputError(f'model.task = "{name}": expected {quote_names(names())}{close(name, names())}')


def task_named(name: str | None) -> TaskFacts | None:
    """The task that an experiment names; None if its data imply it."""
    return None if name is None else find(name)


def implied_task(kind: str) -> TaskFacts:
    """The task for rows of this kind, if the experiment names none."""
    return next((task for task in available() if kind in task.implied_by), available()[0])


def owner(kind: str) -> TaskFacts | None:
    """The task that owns a kind of rows; None for images, texts and vectors, which several tasks read."""
    return next((task for task in _all() if task.own_kind is not None and task.own_kind.name == kind), None)


def row_kind(kind: str) -> RowKind | None:
    """The description of a kind of rows that belongs to a task; None for images, texts and vectors."""
    task = owner(kind)
    return None if task is None else task.own_kind


def row_kinds() -> tuple[RowKind, ...]:
    """The kinds of rows that belong to single tasks, in the order of the tasks."""
    return tuple(task.own_kind for task in available() if task.own_kind is not None)


def endings() -> tuple[str, ...]:
    """Endings of the names of files that only single tasks read."""
    return tuple(dict.fromkeys(ending for task in available() for ending in task.endings))


def reads(ending: str) -> TaskFacts | None:
    """The task that reads files with this ending; None for files that any task reads."""
    return next((task for task in available() if ending in task.endings), None)


def columns() -> dict[str, Column]:
    """The columns of all tasks, by their key in the [data] table. If tasks share a key, the first task decides."""
    found: dict[str, Column] = {}
    for task in available():
        for column in task.columns:
            found.setdefault(column.key, column)
    return found


def data_settings(help: str = "") -> dict[str, tuple[Any, Any]]:
    """The tasks' columns as settings: (type, field) by key.

    Args:
        help: a text that replaces the help of each column; {} in the text stands for the key.
    """

    def column(key: str, of: Column) -> tuple[Any, Any]:
        text = help.format(key) or of.help
        return (tuple[str, ...], setting((), text)) if of.several else (str, setting(of.name, text))

    return {key: column(key, of) for key, of in columns().items()}


def model_settings() -> dict[str, tuple[Any, Any]]:
    """The tasks' keys of the [model] table: (type, field) by key. If tasks share a key, the first task decides."""
    found: dict[str, tuple[Any, Any]] = {}
    for task in available():
        hints = types_of(type(task))
        for f in fields(task):
            found.setdefault(key_of(f.name), (hints[f.name], setting(f.default, metadata=f.metadata)))
    return found


def trained_classes(spec: Any) -> int | None:
    """How many classes have training rows by the [model] table: these are the first classes. None means all."""
    task = task_named(spec.task)
    return None if task is None else task.of(spec).trained_classes


def check_keys(spec: Any, task: TaskFacts | None) -> None:
    """Refuse keys of a [model] table that only other tasks have.

    Args:
        task: None if the data will imply it; then a key is refused if no data imply a task that has this key.

    Raises:
        InputError: such a key has another value than its default; the message names the tasks that have the key.
    """
    for key, (_, of) in model_settings().items():
        if getattr(spec, key) == of.default:
            continue
        owners = [other for other in available() if key in {key_of(f.name) for f in fields(other)}]
        whose = " or ".join(f'"{owner}"' for owner in owners)
        if task is None and not any(owner.default or owner.implied_by for owner in owners):
            raise InputError(
                f"model.{key} belongs to task {whose}, which no data imply; set model.task", key=f"model.{key}"
            )
        if task is not None and task.name not in {owner.name for owner in owners}:
            raise InputError(
                f'model.{key} belongs to task {whose}, and the task is "{task}"; drop it', key=f"model.{key}"
            )


def lists_columns(data: Any) -> tuple[str, ...]:
    """The keys of a [data] table that are set and whose value is a list of columns."""
    return tuple(key for key, column in columns().items() if column.several and getattr(data, key))


def figures() -> tuple[str, ...]:
    """Names of the scores in results that only single tasks have."""
    return tuple(dict.fromkeys(name for task in available() for name in task.figures))


def figures_in_reports() -> tuple[str, ...]:
    """Names of the scores of :func:`figures` that reports draw."""
    return tuple(dict.fromkeys(name for task in available() for name in task.drawn))


def sums() -> tuple[str, ...]:
    """Names of the sums over rows from which tasks make their scores."""
    return tuple(dict.fromkeys(name for task in available() for name in task.sums))


def lists() -> frozenset[str]:
    """Names of the scores and sums that are lists, with an entry for each class or target."""
    return frozenset(name for task in available() for name in task.lists)


def sums_to_tell() -> tuple[str, ...]:
    """Names of the sums that a silo reports in addition to its scores, because they do not follow from the scores."""

    def some(task: TaskFacts) -> list[str]:
        given = {"rows", *task.row_means.values()} if task.row_means else set()
        return [name for name in task.sums if name not in given]

    return tuple(dict.fromkeys(name for task in available() for name in some(task)))
