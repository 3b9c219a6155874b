"""Secure sums: every number of clients, message, number of dropouts and seed, and servers that cheat.

It is ``benchmarks/secagg_gate.py`` at its full size, in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gate import ROOT, Gate, Outcome


def attempt(size: float, folder: Path, progress: Callable[[str], None]) -> Outcome:
    """Run the script; below a tenth of the full size in its quick form."""
    page = folder / "sums.md"
    command = [sys.executable, str(ROOT / "benchmarks/secagg_gate.py"), "--out", str(page)]
    command += ["--quick"] if size < 0.1 else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = Outcome()
    found.require(done.returncode == 0, (done.stderr or done.stdout).strip()[-300:])
    text = page.read_text() if page.exists() else done.stdout
    numbers = re.search(r"(\d+) sums and (\d+) attacks", text)
    found.require(numbers is not None, "the script counts no sums")
    if numbers is not None:
        found.count("sums", int(numbers[1]))
        found.count("attacks on sums", int(numbers[2]))
    return found


GATE = Gate("every sum is exact up to t - 1 dropouts, and every server that cheats is refused", attempt)
