"""Descriptions of commands. Each wing, a separate part of fedfm, lists its commands, and the command line adds them
without importing the wing's other code.

Commands are named tuples, because importing dataclasses would delay ``fedfm --help``.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from fedfm.errors import InputError

# Modules that define COMMANDS, and ACTIONS for other commands.
WINGS = ("fedfm.cli.planning_commands", "fedfm.cli.silo_commands", "fedfm.encrypted.commands", "fedfm.sites.commands")


def no_arguments(_: ArgumentParser) -> None:
    """Add no arguments, for a command that has none."""


class Command(NamedTuple):
    """One command of ``fedfm``.

    Attributes:
        name: the word after ``fedfm``.
        run: takes the parsed arguments and returns the exit code. It imports the heavy libraries that it needs.
        help: one line in ``fedfm --help``.
        examples: text below the command's help.
        add_arguments: declares its arguments.
        json: whether it takes ``--format json``.
    """

    name: str
    run: Callable[[Any], int]
    help: str
    examples: str
    add_arguments: Callable[[ArgumentParser], None] = no_arguments
    json: bool = False


def set_argument(parser: ArgumentParser, text: str = "change a key of the experiment") -> None:
    """Add ``--set``, which may be given several times."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def engine_argument(parser: ArgumentParser) -> None:
    """Add ``--engine``."""
    engines = ("local", "simulation", "deployment", "folder")
    parser.add_argument("--engine", choices=engines, help="engine to use instead of run.engine")


def training_arguments(parser: ArgumentParser, table: str) -> None:
    """Add the arguments of a command that trains a model into a folder.

    The command's file has [data], [model] and the table ``table``.
    """
    parser.add_argument("experiment", type=Path, help=f"TOML file with [data], [model] and [{table}]")
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    set_argument(parser, "change a key of the file")


def commands() -> Iterator[Command]:
    """The commands of all wings, in order."""
    for place in WINGS:
        yield from getattr(import_module(place), "COMMANDS", ())


def action(command: str, choice: str) -> Callable[..., Any]:
    """The function of a wing for one choice of another command, such as ``predict --engine deployment``.

    Raises:
        InputError: no installed wing has such a function.
    """
    for place in WINGS:
        if found := getattr(import_module(place), "ACTIONS", {}).get((command, choice)):
            return found  # type: ignore[no-any-return]
    raise InputError(f"fedfm {command}: no installed part of fedfm handles {choice!r}")
