"""What a command costs before it computes: CPU seconds beside the import of what its model needs.

    python benchmarks/start.py
    python benchmarks/start.py --quick

Each command is a process of its own, and so is the import beside it: torch and one class of transformers for the
built-in vision model, torch and numba, which compiles the loops of a linear head, for feature vectors. All take turns;
the ratio of a turn compares neighbours, so that a busy machine slows both. A first turn, which does not count, writes
the byte code and the kernels' caches. The run has no rounds: it loads, evaluates the start and writes its report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import numpy as np

MOST = 1.25
IMPORTS = {
    "pictures": "import torch; from transformers import ViTForImageClassification",
    "features": "import torch, numba",
}
COMMANDS = {
    "check": ("check", "{kind}.toml"),
    "run": ("run", "{kind}.toml", "--out", "{kind}-again"),
    "predict": ("predict", "{kind}", "{kind}.npz"),
    "report": ("report", "{kind}"),
    "compare": ("compare", "{kind}", "{kind}"),
}


def main() -> None:
    """Time all commands in turn, and print ratios and goals."""
    args = common.arguments(__doc__)
    folder, turns = common.scratch(), 1 if args.quick else 5
    _prepare(folder)
    times: dict[str, list[float]] = {}
    for turn in range(turns + 1):
        for kind, code in IMPORTS.items():
            jobs = {"import": ("-c", code)} | {name: ("-m", "fedfm", *words) for name, words in COMMANDS.items()}
            for name, words in jobs.items():
                shutil.rmtree(folder / f"{kind}-again", ignore_errors=True)
                spent = _cpu_seconds([word.format(kind=kind) for word in words], folder)
                if turn:
                    times.setdefault(f"{kind} {name}", []).append(spent)
    rows: list[dict[str, Any]] = []
    goals = []
    for kind in IMPORTS:
        base = [(0.0, t) for t in times[f"{kind} import"]]
        for name in COMMANDS:
            ratio = common.ratio([(0.0, t) for t in times[f"{kind} {name}"]], base)
            rows.append({"rows": kind, "command": name, "times the import": ratio})
            goals.append(common.goal(f"{name} of {kind}, times the import", ratio["median"], most=MOST))
    seconds = {kind: common.median([(0.0, t) for t in times[f"{kind} import"]]) for kind in IMPORTS}
    notes = [f"import for {kind}: {s:.2f} CPU seconds ({IMPORTS[kind]})" for kind, s in seconds.items()]
    common.emit("The start of commands", [{"title": "CPU seconds of a process", "rows": rows}], goals, notes)


def _prepare(folder: Path) -> None:
    """Experiments, rows, and a finished run of each."""
    rng, labels = np.random.default_rng(0), np.arange(60) % 3
    pictures = rng.integers(0, 256, (60, 8, 8, 1), dtype=np.uint8)
    vectors = (rng.normal(size=(60, 8)) + labels[:, None]).astype(np.float32)
    for kind, x, model in (("pictures", pictures, "nano-vit"), ("features", vectors, "features")):
        np.savez(folder / f"{kind}.npz", x=x, y=labels, classes=np.array(["a", "b", "c"]))
        (folder / f"{kind}.toml").write_text(
            f'[data]\npath = "{kind}.npz"\npartition = {{ name = "iid", clients = 2 }}\n[model]\nname = "{model}"\n'
            '[method]\nname = "fedavg"\nrounds = 0\n[run]\nworkers = 1\n'
        )
        _cpu_seconds(["-m", "fedfm", "run", f"{kind}.toml", "--out", kind], folder)


def _cpu_seconds(words: list[str], folder: Path) -> float:
    """User and system seconds of a Python process, also of those that it has started and waited for."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"OMP_NUM_THREADS": "1"}
    before = os.times()
    subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True, capture_output=True)
    after = os.times()
    return sum(a - b for a, b in zip(after[2:4], before[2:4], strict=True))


if __name__ == "__main__":
    main()
