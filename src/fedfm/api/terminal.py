"""Output of commands: text for people, or one JSON line for programs."""

from __future__ import annotations

import errno
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any, TextIO

from fedfm.core.text import to_json, visible_lines
from fedfm.errors import InputError


def tell(text: str, where: TextIO | None = None) -> None:
    """Print text for people. Control characters are escaped, because texts contain names that other people chose.

    What would go to the standard error is dropped if its terminal has been closed.
    """
    try:
        print(visible_lines(text), file=where)
    except OSError as error:
        if where is not sys.stderr or error.errno != errno.EIO:
            raise


def say(args: Namespace, result: dict[str, Any], text: str | Callable[[], str]) -> int:
    """Print a result as a JSON line or as text; returns exit code 0.

    Args:
        text: the text, or a function that makes it.
    """
    if args.format == "json":
        print(to_json(result, ascii=True), flush=True)
    else:
        tell(text if isinstance(text, str) else text())
    return 0


def continuing(args: Namespace, about: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a training that writes a model folder, and return its result; if it stops, print how to continue."""
    try:
        return call()
    except InputError:
        raise
    except (KeyboardInterrupt, Exception):
        if (args.out / about).exists():
            print("fedfm: finished epochs are kept; the same command continues", file=sys.stderr)
        raise
