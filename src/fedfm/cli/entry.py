"""Entry point of the command line. Commands import heavy libraries themselves: ``--help`` and ``list`` need none."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from fedfm.cli.commands import INTERRUPTED, tell
from fedfm.cli.parser import build
from fedfm.errors import FedfmError, InputError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 done, 1 failed, 2 wrong input, 130 stopped by the user."""
    args = build().parse_args(_whole(sys.argv[1:] if argv is None else argv))
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
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise  # not about a file: a defect here, or the network
        print(f"fedfm: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1


def _whole(argv: Sequence[str]) -> list[str]:
    """Join a list that begins with a minus to its flag: argparse would take it for a flag of its own."""
    out: list[str] = []
    for word in argv:
        if out and out[-1] in ("--seeds", "--tune") and re.match(r"-[\d.]", word):
            out[-1] += f"={word}"
        else:
            out.append(word)
    return out
