"""A federation of 1,000 to a million clients, of whom a hundred a round train: what grows with it, and what does not.

    python benchmarks/many_clients.py            # five minutes on one core, 1 GB of disk
    python benchmarks/many_clients.py --quick    # up to 10,000 clients, half a minute

A client has three training rows of 32 features and 0.75 test rows. Heads by FedAvg, 10 rounds, 100 clients a round,
scores of 100 clients at the start and at the end. Each line is a process of its own: its CPU time and its largest
resident size with Python and torch, and the files of its run directory.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

COHORT, ROUNDS, FEATURES = 100, 10, 32
CLIENTS = (1_000, 10_000, 100_000, 1_000_000)
GOAL = 100_000  # clients of the goals


def rows(path: Path, clients: int) -> Path:
    """An npz of three training rows a client, and a fifth of all rows for tests."""
    rng, n = np.random.default_rng(0), clients * 15 // 4
    y = rng.integers(0, 5, n)
    x = (rng.standard_normal((n, FEATURES)) + np.eye(5, FEATURES)[y] * 3).astype(np.float32)
    np.savez(path, x=x, y=y)
    return path


def part(options: Any) -> None:
    """One run, in this process."""
    import fedfm

    share = COHORT / options.clients
    fedfm.run(
        {
            "data": {"path": str(options.path), "partition": {"name": "iid", "clients": options.clients}},
            "model": {"name": "features"},
            "method": {"name": "fedavg", "rounds": ROUNDS, "fraction": share, "local": {"learning_rate": 0.1}},
            "run": {
                "workers": 1,
                "evaluate_every": ROUNDS,
                "evaluate_fraction": 1.0 if options.everybody else share,
            },
        },
        options.out,
    )
    lines = [json.loads(line) for line in (options.out / "metrics.jsonl").read_text().splitlines()]
    ends = [line["seconds"] for line in lines]
    trained = [after - before for before, after in itertools.pairwise(ends[:-1])]
    size = {p.name: p.stat().st_size / 1e6 for p in options.out.rglob("*") if p.is_file()}
    row = {"CPU s": time.process_time(), "s a round": statistics.median(trained), "peak MiB": common.peak_mib()}
    files = {f"{name.partition('.')[0]} MB": size[name] for name in ("manifest.json", "messages.jsonl", "report.html")}
    print(json.dumps(row | {"run directory MB": sum(size.values())} | files))


def main() -> None:
    options = common.arguments(
        __doc__,
        clients={"type": int},
        path={"type": Path},
        out={"type": Path},
        everybody={"action": "store_true"},
    )
    if options.clients:
        part(options)
        return
    folder, script = common.scratch(), str(Path(__file__).resolve())

    def measured(clients: int, path: Path, *more: str) -> dict[str, Any]:
        out = str(folder / f"run-{clients}{len(more)}")
        found = common.child(script, "--clients", str(clients), "--path", str(path), "--out", out, *more, limit=3600)
        return {"clients": clients, "scores of": "all" if more else COHORT} | found

    table = []
    for clients in CLIENTS[:2] if options.quick else CLIENTS:
        path = rows(folder / f"{clients}.npz", clients)
        table.append(measured(clients, path))
        if clients <= GOAL:
            table.append(measured(clients, path, "--everybody"))
        path.unlink()
    goals = []
    for row in table:
        if row["clients"] == GOAL and row["scores of"] == COHORT:
            bounds = {"CPU s": 60, "peak MiB": 1024, "run directory MB": 20}
            goals = [common.goal(f"{key}, {GOAL:,} clients", row[key], most=most) for key, most in bounds.items()]
    common.emit("Many clients", [{"title": "Growth with the federation", "rows": table}], goals)


if __name__ == "__main__":
    sys.exit(main())
