"""What it takes to start: CPU seconds of the commands that only answer, and the time to the demo's first round.

    python benchmarks/start.py

Each command runs in a process of its own, in turn with the others; CPU seconds are user plus system of that process and
its children. For comparison: Python alone, importing torch, and Flower's own command line.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import common

HERE = Path(sys.executable).parent
COMMANDS: dict[str, list[str]] = {
    "fedfm --help": [str(HERE / "fedfm"), "--help"],
    "fedfm list": [str(HERE / "fedfm"), "list"],
    "fedfm show fedavg": [str(HERE / "fedfm"), "show", "fedavg"],
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    "flwr --help": [str(HERE / "flwr"), "--help"],
}


def once(command: Sequence[str]) -> tuple[float, float]:
    """(wall, CPU) seconds of a command."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ends with {process.returncode}")
    return time.perf_counter() - begun, usage.ru_utime + usage.ru_stime


def first_round(limit: float = 300.0) -> float:
    """Wall-clock seconds from the start of `fedfm demo` to the line of its first finished round."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [str(HERE / "fedfm"), "demo", "--out", f"{folder}/demo"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while time.perf_counter() - begun < limit:
                for path in Path(folder).glob("**/metrics.jsonl"):
                    if '"round": 1' in path.read_text():
                        return time.perf_counter() - begun
                if process.poll() is not None:
                    raise SystemExit(f"fedfm demo ended with {process.returncode} before its first round")
                time.sleep(0.02)
            raise SystemExit(f"fedfm demo finished no round within {limit:g} s")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    options = common.arguments(__doc__, turns={"type": int, "default": 11}, demos={"type": int, "default": 3})
    turns, demos = (2, 1) if options.quick else (options.turns, options.demos)
    commands = {name: c for name, c in COMMANDS.items() if Path(c[0]).exists()}
    times: common.Times = {name: [] for name in commands}
    for turn in range(turns + 1):
        for name, command in commands.items():
            spent = once(command)
            if turn:
                times[name].append(spent)
    rows = [
        {
            "command": name,
            "CPU seconds": {
                "median": round(common.median(spent), 3),
                "min": round(min(c for _, c in spent), 3),
                "max": round(max(c for _, c in spent), 3),
            },
            "wall seconds": round(common.median(spent, 0), 3),
        }
        for name, spent in times.items()
    ]
    goals = [
        common.goal(f"CPU seconds of `{row['command']}`", row["CPU seconds"]["median"], most=0.15)  # type: ignore[index]
        for row in rows[:3]
    ]
    waits = [first_round() for _ in range(demos)]
    demo = [
        {
            "from `fedfm demo` to": "its first finished round",
            "wall seconds": {
                "median": round(statistics.median(waits), 2),
                "min": round(min(waits), 2),
                "max": round(max(waits), 2),
            },
        }
    ]
    tables = [{"title": "Commands", "rows": rows}, {"title": "The demo", "rows": demo}]
    common.emit("Start", tables, goals)


if __name__ == "__main__":
    main()
