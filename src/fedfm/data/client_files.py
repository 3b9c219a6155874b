"""Join the files of several clients into one table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedfm.core import tasks
from fedfm.core.text import listing, several
from fedfm.data.partition import CLIENT
from fedfm.data.sources._files import existing, str_array
from fedfm.data.table import Table, words_of
from fedfm.errors import InputError

_FEW, _TAIL = 8, 0.05  # smallest number of targets that are compared; share of them below and above a range
_INTEGER = re.compile(r"0|-?[1-9][0-9]*").fullmatch


def of_clients(
    clients: Mapping[str, str],
    read: Callable[[Path], Table],
    hold_out: Callable[[str, Table], Table],
    task: str | None = None,
) -> Table:
    """Read all clients' files into one table, in the order of the clients' names.

    Args:
        clients: client's name -> path of its file.
        read: returns the table of a client's file.
        hold_out: returns a client's table with test rows; its arguments are the client's name and its table.
        task: the model's task; None if the data imply it.
    """
    tables: dict[str, Table] = {}
    drawn = list[str]()
    for name, path in sorted(clients.items()):
        try:
            table = read(existing(path, f"data.clients.{name}"))
            tables[name] = hold_out(name, table)
            drawn += [name] if len(tables[name].rows("test")) > len(table.rows("test")) else []
        except InputError as error:
            key = f"data.clients.{name}"
            raise error if error.key == key else InputError(f"{key}: {error}", key=key) from None
    first = next(iter(tables))
    for name, table in tables.items():
        mine, theirs = _form(table), _form(tables[first])
        if mine != theirs:
            raise InputError(
                f"data.clients: {name} ({table.source}) holds {mine} and {first} ({tables[first].source}) holds "
                f"{theirs}: all clients' rows must have the same form"
            )
    classes = unite([table.classes for table in tables.values()])
    code = {name: index for index, name in enumerate(classes)}
    labels = [
        np.array([code[name] for name in table.classes], dtype=np.int64)[table.labels]
        for table in tables.values()
        if table.labels is not None
    ]
    targets = [
        reorder_targets(table.targets, table.classes, code) for table in tables.values() if table.targets is not None
    ]
    keys = sorted({key for table in tables.values() for key in table.columns} - {CLIENT})
    columns = {
        key: str_array([v for t in tables.values() for v in t.columns.get(key, np.full(len(t), "")).tolist()])
        for key in keys
    }
    columns[CLIENT] = str_array([name for name, table in tables.items() for _ in range(len(table))])
    parts = [table.inputs for table in tables.values()]
    arrays = isinstance(parts[0], np.ndarray)
    return Table(
        tables[first].kind,
        np.concatenate(parts) if arrays else [item for part in parts for item in part],
        np.concatenate(labels) if labels else None,
        classes,
        np.concatenate([table.split for table in tables.values()]),
        columns,
        ", ".join(table.source for table in tables.values()),
        (
            *(f"{name}: {notice}" for name, table in tables.items() for notice in table.notices),
            *_apart(tables, tasks.class_word(tables[first].kind, task)),
            *_targets_apart(tables),
            *_unnamed_columns(tables),
            *_drawn_tests(tables, drawn),
        ),
        tuple(dict.fromkeys(name for table in tables.values() for name in table.read)),
        _names_of_columns(tables),
        targets=np.concatenate(targets) if targets else None,
    )


def reorder_targets(targets: np.ndarray, names: Sequence[str], code: Mapping[str, int]) -> np.ndarray:
    """A client's targets (n, T), put in the order of all clients' targets (n, U); NaN for targets that it lacks."""
    found = np.full((len(targets), len(code)), np.nan)
    found[:, [code[name] for name in names]] = targets
    return found


def _names_of_columns(tables: Mapping[str, Table]) -> tuple[str, ...]:
    """The names of the feature columns. All files that have such names must have the same ones in the same order."""
    named = {name: table for name, table in tables.items() if table.names}
    if not named:
        return ()
    from fedfm.data.profiles import check_names

    first = next(iter(named))
    for name, table in named.items():
        check_names(named[first].names, table.names, f"data.clients.{name}: {table.source}", f"the file of {first}")
    return named[first].names


def _apart(tables: Mapping[str, Table], word: str) -> tuple[str, ...]:
    """A notice if clients probably write the same classes differently, e.g. as numbers and as names."""
    if text := _other_numbering(tables, word) or _disjoint(tables, word):
        return (text,)
    numbering = {name: all(map(_INTEGER, table.classes)) for name, table in tables.items() if table.classes}
    by = {kind: [name for name, numbers in numbering.items() if numbers == kind] for kind in (True, False)}
    if not by[True] or not by[False]:
        return ()
    return (
        f"the {several(word)} of {listing(by[True], 4)} are numbers and those of {listing(by[False], 4)} are names, so "
        f"they are separate {several(word)}: if they mean the same, write them alike (a column label_name gives "
        "numbers their names)",
    )


def _targets_apart(tables: Mapping[str, Table]) -> list[str]:
    """A notice for each target of which a client has other numbers than the largest client, as in another unit."""
    ranges: dict[str, dict[str, np.ndarray]] = {}
    for client, table in sorted(tables.items(), key=lambda item: -len(item[1])):
        for j, target in enumerate(table.classes if table.targets is not None else ()):
            values = table.targets[:, j]  # type: ignore[index]
            if len(values) >= _FEW and not np.isin(values, (0, 1)).all():
                ranges.setdefault(target, {})[client] = np.quantile(values, (_TAIL, 1 - _TAIL))
    found = []
    for target, of in ranges.items():
        (first, (low, high)), *others = of.items()
        for client, (least, most) in others:
            if least > high or most < low:
                found.append(
                    f'the usual numbers of "{target}" are from {low:.4g} to {high:.4g} in {first}, and from '
                    f"{least:.4g} to {most:.4g} in {client}: are they in other units?"
                )
    return found


def _unnamed_columns(tables: Mapping[str, Table]) -> list[str]:
    """A notice if only some files name their feature columns, since the order of the others cannot be checked."""
    by = {named: [name for name, table in tables.items() if bool(table.names) == named] for named in (True, False)}
    if not by[True] or not by[False]:
        return []
    return [
        f"{listing(by[True], 4)} name the columns of x, and {listing(by[False], 4)} do not: they are taken to have the "
        "same order"
    ]


def _drawn_tests(tables: Mapping[str, Table], drawn: Sequence[str]) -> list[str]:
    """A notice if test rows are drawn for some clients, and other files mark theirs."""
    if not drawn or not any(len(table.rows("test")) for name, table in tables.items() if name not in drawn):
        return []
    return [f"test rows are drawn from training rows for {listing(drawn, 4)}, since only others mark them"]


def _other_numbering(tables: Mapping[str, Table], word: str) -> str | None:
    """A notice if some clients number their classes from 0, and all others number equally many classes from 1."""
    sets = {
        name: [int(c) for c in table.classes] for name, table in tables.items() if all(map(_INTEGER, table.classes))
    }
    count = max(map(len, sets.values()), default=0)
    zero = [name for name, numbers in sets.items() if numbers == list(range(count))]
    one = [name for name, numbers in sets.items() if numbers == list(range(1, count + 1))]
    if count < 2 or not zero or not one or len(zero) + len(one) < len(tables):
        return None
    return (
        f"the {several(word)} of {listing(zero, 4)} are 0 to {count - 1} and those of {listing(one, 4)} are 1 to "
        f"{count}, and equal numbers are one {word}: if they mean the same, number them alike"
    )


def _disjoint(tables: Mapping[str, Table], word: str) -> str | None:
    """A notice if each client has several classes, and no two clients have a class in common."""
    named = {name: {text.casefold() for text in table.classes} for name, table in tables.items()}
    kinds = {all(map(_INTEGER, classes)) for classes in named.values()}
    few = len(named) < 2 or min(map(len, named.values())) < 2
    if few or len(kinds) > 1 or sum(map(len, named.values())) > len(set[str]().union(*named.values())):
        return None
    shown = " and ".join(f"{name} has {listing(tables[name].classes[:2])}" for name in list(named)[:2])
    return f"no two clients have a {word} in common ({shown}): if they mean the same, name them alike"


def unite(classes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The classes of all clients: unchanged if all clients have the same list, else sorted (integers by value)."""
    if len(set(classes)) == 1:
        return classes[0]
    names = {name for one in classes for name in one}
    if all(map(_INTEGER, names)):
        return tuple(sorted(names, key=int))
    return tuple(sorted(names))


def _form(table: Table) -> str:
    """A description of the form of the rows, which must be the same for all clients."""
    words = words_of(table.kind)
    if not isinstance(table.inputs, np.ndarray):
        return words + (" as files" if table.kind == "image" else "")
    return f"{words} of {'x'.join(map(str, table.inputs.shape[1:]))}"
