"""Turn a library's errors about a user's model, rows or settings into one-line errors of fedfm.

An error raised in fedfm's own code is a defect, and passes with its traceback. The place where an error was raised
shows whether it is a defect or an error of a library.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from fedfm.errors import FedfmError, InputError, first_line, is_panic

_OURS = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def refuse(where: str) -> Iterator[None]:
    """Context manager: an error of a library becomes an InputError that begins with ``where``.

    Errors of the system and of memory are not about the input, and pass unchanged.

    Raises:
        InputError: a library raised an error. The message has the error's first line, and the error is its cause.
    """
    try:
        yield
    except (FedfmError, MemoryError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        # Libraries also raise OSError for their own errors, but without a number.
        of_system = isinstance(error, OSError) and error.errno is not None
        if of_system or is_ours(error) or _is_of_memory(error):
            raise
        raise InputError(f"{where}: {describe(error)}") from error


def describe(error: BaseException, most: int = 300) -> str:
    """The class and the first line of an error."""
    text = first_line(error, most)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_ours(error: BaseException) -> bool:
    """Whether a line of fedfm itself raised the error, not code that such a line calls."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and is_of_fedfm(frames[-1])


def is_of_fedfm(frame: traceback.FrameSummary) -> bool:
    """Whether a line of a traceback is fedfm's."""
    return Path(frame.filename).resolve().is_relative_to(_OURS)


def _is_of_memory(error: BaseException) -> bool:
    return type(error).__name__ in ("OutOfMemoryError", "AcceleratorError")
