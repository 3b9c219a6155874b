"""Whose line raised an error: a library's, fedfm's or one of a user's own code. Imported only after an error."""

from __future__ import annotations

import sysconfig
import tempfile
import traceback
from itertools import dropwhile
from pathlib import Path
from types import ModuleType

from fedfm.core.libraries import describe, is_of_fedfm
from fedfm.errors import close

_PACKAGES = {"site-packages", "dist-packages"}


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


def is_library(error: BaseException) -> bool:
    """Whether a line of an installed package or of Python's own library raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not is_of_fedfm(frames[-1]) and _is_installed(frames[-1])


def line_of_user(error: BaseException) -> str:
    """The last line of a user's own code, such as a method, that fedfm called before the error; empty if none."""
    frames = traceback.extract_tb(error.__traceback__)
    called = dropwhile(lambda frame: not is_of_fedfm(frame), frames)  # a script that calls fedfm comes first
    own = [frame for frame in called if not (is_of_fedfm(frame) or _is_installed(frame))]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


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
