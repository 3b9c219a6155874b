"""Describe an unexpected error of a command in one line; imported only after such an error."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def describe_error(error: Exception, args: argparse.Namespace) -> str:
    """Describe an error of the operating system, of a library, of a user's own code, or a defect of fedfm."""
    return _about_a_file(error, args) or _defect_line(error)


def _defect_line(error: Exception) -> str:
    """Describe a defect of fedfm, or an unexpected error of a library or of a user's own code, in one line."""
    from fedfm.core import error_places, libraries

    try:
        place = f"the traceback is in {error_places.keep_traceback(error)}"
    except OSError as failure:
        place = f"the traceback could not be written: {failure.strerror}"
    whose = "an error of a library" if error_places.is_library(error) else "a defect of fedfm, please report it"
    if line := error_places.line_of_user(error):
        whose = f"at {line}"
    return f"{libraries.describe(error)} ({whose}; {place})"


def _about_a_file(error: Exception, args: argparse.Namespace) -> str | None:
    """Describe an error of the operating system in one line; None if the error is not about a file."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if "torch" not in sys.modules and not isinstance(error, OSError):
        return None  # without torch, no library is loaded that raises its own errors about files
    from fedfm.core import storage
    from fedfm.runtime import row_cache

    given = [getattr(args, name, None) for name in ("out", "folder", "kit", "run", "key")]
    places = [place for place in given if isinstance(place, Path)]
    place = storage.place_of(error, (*places, *row_cache.places(), Path()))
    return None if place is None else f"cannot write {place}: {storage.why(error)}"
