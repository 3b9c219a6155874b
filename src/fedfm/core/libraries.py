"""Turn a library's errors about a user's model, rows or settings into one-line errors of fedfm.

An error raised in fedfm's own code is a defect, and passes with its traceback. The place where an error was raised
shows whether it is a defect or an error of a library.
"""

from __future__ import annotations

import contextlib
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from types import ModuleType

from fedfm.errors import FedfmError, InputError, close, first_line

_PACKAGES = {"site-packages", "dist-packages"}
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
    except Exception as error:
        # Libraries also raise OSError for their own errors, but without a number.
        of_system = isinstance(error, OSError) and error.errno is not None
        if of_system or is_ours(error) or _is_of_memory(error):
            raise
        raise InputError(f"{where}: {describe(error)}") from error


def describe(error: BaseException, most: int = 300) -> str:
    """The class and the first line of an error."""
    text = first_line(error, most)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def of_import(error: Exception) -> str:
    """Why a user's module cannot be imported, or lacks a name; with the line that failed, or what to do."""
    if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] != "fedfm":
        return f"{error}: put its folder on PYTHONPATH, or install it"
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        return f"{error}{close(error.name, vars(error.obj))}"
    if isinstance(error, (ImportError, AttributeError, ValueError, SyntaxError)):
        return describe(error) if isinstance(error, SyntaxError) else str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{describe(error)} ({last.filename}, line {last.lineno})"


def is_ours(error: BaseException) -> bool:
    """Whether a line of fedfm itself raised the error, not code that such a line calls."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_of_fedfm(frames[-1])


def is_library(error: BaseException) -> bool:
    """Whether a line of an installed package or of Python's own library raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not _is_of_fedfm(frames[-1]) and _is_installed(frames[-1])


def line_of_user(error: BaseException) -> str:
    """The last line of a user's own code, such as a method, that fedfm called before the error; empty if none."""
    frames = traceback.extract_tb(error.__traceback__)
    called = dropwhile(lambda frame: not _is_of_fedfm(frame), frames)  # a script that calls fedfm comes first
    own = [frame for frame in called if not (_is_of_fedfm(frame) or _is_installed(frame))]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


def _is_of_fedfm(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).resolve().is_relative_to(_OURS)


def _is_installed(frame: traceback.FrameSummary) -> bool:
    place = Path(frame.filename)
    generated = frame.filename.startswith("<")  # code without a file, such as a dataclass's methods
    return generated or bool(_PACKAGES & {*place.parts}) or place.is_relative_to(sysconfig.get_path("stdlib"))


def keep_traceback(error: BaseException) -> Path:
    """Write the traceback into a new file that only its owner can read."""
    handle, name = tempfile.mkstemp(prefix="fedfm-", suffix=".traceback.txt")
    with open(handle, "w", encoding="utf-8", errors="replace") as file:
        file.write("".join(traceback.format_exception(error)))
    return Path(name)


def _is_of_memory(error: BaseException) -> bool:
    return type(error).__name__ in ("OutOfMemoryError", "AcceleratorError")
