"""What it takes to start: CPU seconds of the commands that only answer, and the time to the demo's first round.

    python benchmarks/start.py

Each command runs in a process of its own, in turn with the others; CPU seconds are user plus system of that process and
its children. For comparison: Python alone, importing torch, and Flower's own command line.

The commands that load a model stand beside the import of what it needs: torch and one class of transformers for the
built-in vision model, torch alone for a linear head on feature vectors. Neighbours in a turn are compared. The first
turn, which does not count, writes byte code. The run has no rounds: it loads, evaluates the start and writes its
report.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np

HERE = Path(sys.executable).parent
COMMANDS: dict[str, list[str]] = {
    "fedfm --help": [str(HERE / "fedfm"), "--help"],
    "fedfm list": [str(HERE / "fedfm"), "list"],
    "fedfm show fedavg": [str(HERE / "fedfm"), "show", "fedavg"],
    "python -c pass": [sys.executable, "-c", "pass"],
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    "flwr --help": [str(HERE / "flwr"), "--help"],
}
IMPORTS = {
    "pictures": "import torch; from transformers import ViTForImageClassification",
    "features": "import torch",
}
LOADING = {
    "check": ("check", "{kind}.toml"),
    "run": ("run", "{kind}.toml", "--out", "{kind}-again"),
    "predict": ("predict", "{kind}", "{kind}.npz"),
    "report": ("report", "{kind}"),
    "compare": ("compare", "{kind}", "{kind}"),
}


def once(command: Sequence[str], folder: Path | None = None) -> tuple[float, float]:
    """(wall, CPU) seconds of a command."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, env=environment
    )
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


def prepare(folder: Path) -> None:
    """An experiment on pictures and one on feature vectors, their rows, and a finished run of each."""
    rng, labels = np.random.default_rng(0), np.arange(60) % 3
    pictures = rng.integers(0, 256, (60, 8, 8, 1), dtype=np.uint8)
    vectors = (rng.normal(size=(60, 8)) + labels[:, None]).astype(np.float32)
    for kind, x, model in (("pictures", pictures, "nano-vit"), ("features", vectors, "features")):
        np.savez(folder / f"{kind}.npz", x=x, y=labels, classes=np.array(["a", "b", "c"]))
        (folder / f"{kind}.toml").write_text(
            f'[data]\npath = "{kind}.npz"\npartition = {{ name = "iid", clients = 2 }}\n[model]\nname = "{model}"\n'
            '[method]\nname = "fedavg"\nrounds = 0\n[run]\nworkers = 1\n'
        )
        once([str(HERE / "fedfm"), "run", f"{kind}.toml", "--out", kind], folder)


def loading(turns: int) -> list[dict[str, Any]]:
    """Rows of the commands that load a model: CPU seconds, times those of the import of what it needs."""
    folder = common.scratch()
    prepare(folder)
    times: common.Times = {}
    for turn in range(turns + 1):
        for kind, code in IMPORTS.items():
            jobs = {"import": [sys.executable, "-c", code]}
            jobs |= {n: [str(HERE / "fedfm"), *(w.format(kind=kind) for w in words)] for n, words in LOADING.items()}
            for name, command in jobs.items():
                shutil.rmtree(folder / f"{kind}-again", ignore_errors=True)
                spent = once(command, folder)
                if turn:
                    times.setdefault(f"{kind} {name}", []).append(spent)
    return [
        {
            "rows": kind,
            "command": name,
            "CPU seconds": round(common.median(times[f"{kind} {name}"]), 2),
            "times the import": common.ratio(times[f"{kind} {name}"], times[f"{kind} import"]),
        }
        for kind in IMPORTS
        for name in ("import", *LOADING)
    ]


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
    beside = loading(max(1, turns // 2))
    goals += [
        common.goal(f"{r['command']} of {r['rows']}, times its import", r["times the import"]["median"], most=1.25)
        for r in beside
        if r["command"] != "import"
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
    tables.insert(1, {"title": "Commands that load a model", "rows": beside})
    common.emit("Start", tables, goals)


if __name__ == "__main__":
    main()
