"""The tasks by name. Each file of ``fedfm/tasks`` defines one task and has its name.

Packages that tasks import cannot import the tasks, so they read a task's properties here. This module finds the tasks
in their folder and names none of them. It imports a file when a caller asks for the file's task. Facts of all tasks,
such as the list of all columns, require imports of all files. Only help, messages on wrong input, and rows without a
named task need such facts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fedfm.core.fields import key_of, setting, types_of
from fedfm.core.row_kinds import SHARED, Column, RowKind
from fedfm.errors import InputError, close, quote_names

if TYPE_CHECKING:
    from fedfm.core.task_facts import TaskFacts

_FOLDER = "fedfm.tasks"
_imported: dict[str, TaskFacts] = {}  # by name


@functools.cache
def _names() -> tuple[str, ...]:
    """The names of all tasks, including those that experiment files cannot name; the default first."""
    stems = (entry.name.removesuffix(".py") for entry in files(_FOLDER).iterdir())
    facts = import_module(_FOLDER)
    found = {name for name in stems if not name.startswith("_") and name.isidentifier()} - {facts.INTERFACE}
    return tuple(sorted(found, key=lambda name: (name != facts.DEFAULT, name)))


def _task(name: str) -> TaskFacts:
    """The task in the file of this name, with the defaults of its keys."""
    if name not in _imported:
        module = import_module(f"{_FOLDER}.{name}")
        classes = (cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__)
        found = next((cls for cls in classes if vars(cls).get("name") == name), None)
        if found is None:
            raise TypeError(f"{module.__file__}: expected a task named {name!r}, as the file")
        _imported[name] = found()
    return _imported[name]


def _first(that: Callable[[TaskFacts], bool], guess: str = "") -> TaskFacts | None:
    """The only task for which ``that`` holds, or None. Imported tasks are tried first, then the task ``guess``."""
    names = (*tuple(_imported), *(name for name in _names() if name == guess), *_names())
    return next((task for task in map(_task, names) if that(task)), None)


@functools.cache
def available() -> tuple[TaskFacts, ...]:
    """The tasks that an experiment file may name, the default first."""
    return tuple(map(_task, names()))


def names(that: Callable[[TaskFacts], bool] | None = None) -> tuple[str, ...]:
    """Names of the tasks that an experiment file may name, and for which ``that`` holds.

    Example:
        >>> names(lambda task: task.two_encoders)
        ('zero_shot',)
    """
    if that is not None:
        return tuple(task.name for task in available() if that(task))
    unnamed: tuple[str, ...] = import_module(_FOLDER).UNNAMED
    return tuple(name for name in _names() if name not in unnamed)


def find(name: str | TaskFacts) -> TaskFacts:
    """The task of this name, with the defaults of its keys; a task itself is returned unchanged.

    Raises:
        InputError: there is no such task.
    """
    if not isinstance(name, str):
        return name
    if name not in _names():
        raise InputError(f'model.task = "{name}": expected {quote_names(names())}{close(name, names())}')
    return _task(name)


def task_named(name: str | None) -> TaskFacts | None:
    """The task that an experiment names; None if its data imply it."""
    return None if name is None else find(name)


def default() -> TaskFacts:
    """The task of rows that imply no other."""
    return _task(_names()[0])


def implied_task(kind: str) -> TaskFacts:
    """The task for rows of this kind, if the experiment names none."""
    return (
        None if kind in SHARED else _first(lambda task: task.in_files and kind in task.implied_by, kind)
    ) or default()


def class_word(kind: str, task: str | None) -> str:
    """The word of messages for a class of rows of this kind; ``task`` names the task, or None if the rows imply it."""
    return (task_named(task) or implied_task(kind)).class_word


def owner(kind: str) -> TaskFacts | None:
    """The task that owns a kind of rows; None for images, texts and vectors, which several tasks read."""
    if kind in SHARED:
        return None
    return _first(lambda task: task.own_kind is not None and task.own_kind.name == kind, kind)


def row_kind(kind: str) -> RowKind | None:
    """The description of a kind of rows that belongs to a task; None for images, texts and vectors."""
    task = owner(kind)
    return None if task is None else task.own_kind


def row_kinds() -> tuple[RowKind, ...]:
    """The kinds of rows that belong to single tasks, in the order of the tasks."""
    return tuple(task.own_kind for task in available() if task.own_kind is not None)


def remote_kinds() -> tuple[str, ...]:
    """The kinds of rows that ``data.kind`` may name at a server without rows."""
    return (*SHARED, *(kind.name for kind in row_kinds() if kind.remote))


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


def column_name(key: str) -> str:
    """The name of a column whose key is not set.

    It is the key, unless a task gives another name. Only this task's rows have the column, so the task is imported.
    """
    return next((of.name for task in _imported.values() for of in task.columns if of.key == key), key)


def data_setting(key: str, help: str = "") -> tuple[Any, Any] | None:
    """A task's column as a setting: (type, field); None if no task has this key.

    Args:
        help: text in place of the column's own help; {} in the text stands for the key.
    """
    task = _first(lambda task: task.in_files and any(column.key == key for column in task.columns))
    return None if task is None else _setting_of(next(of for of in task.columns if of.key == key), help)


def data_settings(help: str = "") -> dict[str, tuple[Any, Any]]:
    """The columns of all tasks as settings: (type, field) by key; ``help`` as in :func:`data_setting`."""
    return {key: _setting_of(of, help) for key, of in columns().items()}


def _setting_of(of: Column, help: str) -> tuple[Any, Any]:
    text = help.format(of.key) or of.help
    return (tuple[str, ...], setting((), text)) if of.several else (str, setting(of.name, text))


def model_settings(task: TaskFacts | None = None) -> dict[str, tuple[Any, Any]]:
    """Keys of the [model] table that a task adds, or all tasks for None: (type, field) by key.

    If several tasks have the same key, the first of these tasks decides its type and field.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for of in available() if task is None else (task,):
        hints = types_of(type(of))
        for f in fields(of):
            found.setdefault(key_of(f.name), (hints[f.name], setting(f.default, metadata=f.metadata)))
    return found


def trained_classes(spec: Any) -> int | None:
    """Number of classes with training rows, which come first, as the [model] table states it; None means all."""
    task = task_named(spec.task)
    return None if task is None else task.of(spec).trained_classes


def check_keys(spec: Any, task: TaskFacts | None) -> None:
    """Refuse keys of a [model] table that only other tasks have.

    Args:
        task: None if the data will imply it. Then keys of tasks that no data can imply are refused.

    Raises:
        InputError: such a key has another value than its default; the message names the tasks that have the key.
    """
    own = set() if task is None else {key_of(f.name) for f in fields(task)}
    for key in (key for key in spec.added_keys() if key not in own):
        owners = [other for other in available() if key in {key_of(f.name) for f in fields(other)}]
        if getattr(spec, key) == model_settings(owners[0])[key][1].default:
            continue
        whose = " or ".join(f'"{owner}"' for owner in owners)
        if task is not None:
            raise InputError(
                f'model.{key} belongs to task {whose}, and the task is "{task}"; drop it', key=f"model.{key}"
            )
        if not any(owner.default or owner.implied_by for owner in owners):
            raise InputError(
                f"model.{key} belongs to task {whose}, which no data imply; set model.task", key=f"model.{key}"
            )


def lists_columns(data: Any) -> tuple[str, ...]:
    """The keys of a [data] table that are set and whose value is a list of columns."""
    return tuple(key for key in data.added_keys() if isinstance(getattr(data, key), tuple))


def sums_to_tell(task: TaskFacts) -> tuple[str, ...]:
    """Names of the sums that a silo reports in addition to its scores, because they do not follow from the scores."""
    given = {"rows", *task.row_means.values()} if task.row_means else set()
    return tuple(name for name in task.sums if name not in given)
