"""Output of commands: text for people, or one JSON line for programs."""

from __future__ import annotations

import errno
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def hint_on_stop(hint: Callable[[], str | None]) -> Iterator[None]:
    """Context manager: if what runs in it stops, print how to continue, unless ``hint`` returns None."""
    try:
        yield
    except InputError:
        raise
    except (KeyboardInterrupt, Exception):
        if (text := hint()) is not None:
            tell(f"fedfm: {text}", sys.stderr)
        raise


def hint_for_epochs(args: Namespace, about: str) -> str | None:
    """How to continue a training that writes a model folder, once the folder has the file ``about``."""
    kept = (args.out / about).exists()
    return "finished epochs are kept; the same command continues" if kept else None
