"""`fedfm completion`: a script with which a shell completes commands, arguments, names and files.

shtab writes the script from the parser itself, so that every command and argument is in it. A shell loads the script
once; no key press starts Python.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedfm.cli.parser import build
from fedfm.errors import MissingExtra

# Names that argparse does not check, because their import takes time: kinds of the registry.
_NAMES = {("show", "name"): ("methods", "tasks", "attacks", "aggregation"), ("audit", "attack"): ("audits",)}
_TOML, _FOLDERS = ("experiment", "federation"), ("run", "kit", "folder")  # arguments; other paths are any file


def completion(args: Namespace) -> int:
    """Run ``fedfm completion``; return the exit code.

    Raises:
        MissingExtra: shtab is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError:
        raise MissingExtra('fedfm completion needs shtab: pip install "fedfm[completion]"') from None
    from fedfm.config.registry import available
    from fedfm.core import tasks

    parser = build()
    for command, action in _actions(parser):
        if (kinds := _NAMES.get((command, action.dest))) is not None:
            action.choices = [
                name for kind in kinds for name in (tasks.names() if kind == "tasks" else available(kind))
            ]
        elif action.type is Path:
            action.complete = _pattern(action.dest, shtab)  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def _pattern(name: str, shtab: Any) -> Any:
    """What completes a path: names of TOML files, of folders, or of all files."""
    return shtab.glob("*.toml") if name in _TOML else shtab.DIRECTORY if name in _FOLDERS else shtab.FILE


def _actions(parser: ArgumentParser) -> Iterator[tuple[str, Action]]:
    """(command, argument) of all commands."""
    for action in parser._actions:
        if isinstance(commands := action.choices, dict):
            yield from ((name, one) for name, sub in commands.items() for one in sub._actions)
