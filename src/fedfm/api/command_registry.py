"""Commands as values: a wing lists its own, and the command line adds them without importing more of the wing.

A named tuple, since ``fedfm --help`` shall not wait for dataclasses.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from fedfm.errors import InputError

WINGS = ("fedfm.encrypted.commands", "fedfm.sites.commands")  # modules with COMMANDS, and ACTIONS of other commands


def no_arguments(_: ArgumentParser) -> None:
    """Of a command that takes none."""


class Command(NamedTuple):
    """One command of ``fedfm``.

    Attributes:
        name: ``fedfm NAME``.
        run: takes the parsed arguments, returns the exit code; it imports the heavy libraries that it needs.
        help: one line in ``fedfm --help``.
        examples: text below its own help.
        add_arguments: declares its arguments.
        json: it takes ``--format json``.
    """

    name: str
    run: Callable[[Any], int]
    help: str
    examples: str
    add_arguments: Callable[[ArgumentParser], None] = no_arguments
    json: bool = False


def training_arguments(parser: ArgumentParser, table: str) -> None:
    """Those of a command that trains a model's folder by a file with [data], [model] and one table more."""
    parser.add_argument("experiment", type=Path, help=f"TOML file with [data], [model] and [{table}]")
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the file")


def commands() -> Iterator[Command]:
    """Those of the wings, in the order of the list."""
    for place in WINGS:
        yield from getattr(import_module(place), "COMMANDS", ())


def action(command: str, choice: str) -> Callable[..., Any]:
    """What a wing does for one choice of a command of others, such as ``predict --engine deployment``.

    Raises:
        InputError: no wing that is installed has it.
    """
    for place in WINGS:
        if found := getattr(import_module(place), "ACTIONS", {}).get((command, choice)):
            return found  # type: ignore[no-any-return]
    raise InputError(f"fedfm {command}: nothing here does {choice!r}")
