"""Standard streams that were closed before this program started; imported only if one is."""

from __future__ import annotations

import os
import sys


def fill_closed_streams() -> None:
    """Let closed standard streams lead nowhere; otherwise the next file that is opened would get their output."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115 - stays open
