"""Entry point of the command line. Commands import heavy libraries themselves; ``--help`` and ``list`` need none."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from fedfm.api.terminal import tell
from fedfm.cli.parser import build
from fedfm.errors import FedfmError, InputError, Terminated, is_panic

INTERRUPTED = 130
_CLEANING = 5.0  # seconds after a signal in which further signals are ignored


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code.

    0: done; 1: failed; 2: invalid input; 130: stopped by Ctrl-C; 143: ended by SIGTERM; 129: the terminal was closed.
    """
    if None in (sys.stdin, sys.stdout, sys.stderr):
        from fedfm.cli.closed_streams import fill_closed_streams

        fill_closed_streams()
    old: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        stop = _stopper()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}  # else the caller's is kept
        old = {number: of for number, of in before.items() if of == usual.get(number, of)}
        for number in old:
            signal.signal(number, stop)
    try:
        return _perform(_whole(sys.argv[1:] if argv is None else argv))
    finally:
        for number, handler in old.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _stopper() -> Callable[[int, Any], None]:
    """A handler that raises as Ctrl-C does, so that a command's temporary files end with it.

    It ignores further signals for a few seconds, because they would interrupt the removal of these files.
    """
    until = -math.inf

    def stop(number: int, frame: Any) -> None:
        nonlocal until
        if time.monotonic() < until:
            return
        until = time.monotonic() + _CLEANING
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    return stop


def _perform(words: Sequence[str]) -> int:
    """Run a command; return the exit code. Errors are printed in one line."""
    args = argparse.Namespace()
    try:
        args = build(words[0] if words else "").parse_args(words)
        return int(args.command(args) or 0)
    except FedfmError as error:
        tell(f"fedfm: {error}", sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt as stopped:
        tell("fedfm: stopped", sys.stderr)
        return 128 + stopped.number if isinstance(stopped, Terminated) else INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        from fedfm.cli.unexpected_errors import describe_error

        tell(f"fedfm: {describe_error(cast(Exception, error), args)}", sys.stderr)
        return 1


def _whole(argv: Sequence[str]) -> list[str]:
    """Join flag and value by "=" if the value begins with a minus, because argparse would read it as another flag."""
    out: list[str] = []
    for word in argv:
        if out and out[-1] in ("--seeds", "--tune") and re.match(r"-[\d.]", word):
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out
