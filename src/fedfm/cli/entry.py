"""Entry point of the command line. Commands import heavy libraries themselves; ``--help`` and ``list`` need none."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from fedfm.api.terminal import tell
from fedfm.cli.parser import build
from fedfm.errors import FedfmError, InputError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0 done, 1 failed, 2 invalid input, 130 stopped by the user."""
    words = _whole(sys.argv[1:] if argv is None else argv)
    args = build(words[0] if words else "").parse_args(words)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a command's temporary files end with it
    try:
        return int(args.command(args) or 0)
    except FedfmError as error:
        tell(f"fedfm: {error}", sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print("fedfm: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        tell(f"fedfm: {_about_a_file(error, args) or _defect_line(error)}", sys.stderr)
        return 1


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


def _whole(argv: Sequence[str]) -> list[str]:
    """Join flag and value by "=" if the value begins with a minus, because argparse would read it as another flag."""
    out: list[str] = []
    for word in argv:
        if out and out[-1] in ("--seeds", "--tune") and re.match(r"-[\d.]", word):
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out
