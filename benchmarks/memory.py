"""The server's peak memory for 100 and for 1,000 clients, of whom a round asks ten.

    python benchmarks/memory.py
    python benchmarks/memory.py --one lora 1000 2

Each figure is ru_maxrss of a fresh process that runs a whole experiment on the built-in digits with nano-vit through
the public API (``fedfm.run``), with the evaluation at the end. With two workers the clients train in other processes,
so the figure is that of the server alone. With one worker they train in the server's process, and the figure covers
both. All runs share out the same 1,437 rows.
"""

from __future__ import annotations

import statistics
import tempfile
from typing import Any

import common


def one(adaptation: str, clients: int, workers: int, rounds: int) -> dict[str, Any]:
    """Run in this process and read its peak."""
    import fedfm

    tables = common.digits(clients, adaptation)
    tables["method"] |= {"rounds": rounds, "fraction": 10 / clients}
    tables["run"] |= {"workers": workers}
    with tempfile.TemporaryDirectory() as folder:
        result = fedfm.run(tables, f"{folder}/run")
    return {"mib": common.peak_mib(), "accuracy": result["accuracy"]}


def main() -> None:
    options = common.arguments(
        __doc__,
        one={"nargs": 3, "metavar": ("ADAPTATION", "CLIENTS", "WORKERS"), "help": "one run in this process"},
        rounds={"type": int, "default": 5},
        turns={"type": int, "default": 2},
    )
    if options.one:
        adaptation, clients, workers = options.one
        import json

        print(json.dumps(one(adaptation, int(clients), int(workers), options.rounds)))
        return
    rows, goals = [], []
    rounds, turns = (1, 1) if options.quick else (options.rounds, options.turns)
    for adaptation in ("head", "lora"):
        for workers in (1, 2):
            peaks: dict[int, list[float]] = {100: [], 1000: []}
            for _ in range(turns):
                for clients, found in peaks.items():
                    arguments = ("--one", adaptation, str(clients), str(workers), "--rounds", str(rounds))
                    found.append(common.child(__file__, *arguments)["mib"])
            few, many = (statistics.median(found) for found in peaks.values())
            ratios = [b / a for a, b in zip(*peaks.values(), strict=True)]
            rows.append(
                {
                    "adaptation": adaptation,
                    "workers": workers,
                    "100 clients, MiB": round(few),
                    "1,000 clients, MiB": round(many),
                    "ratio": {
                        "median": round(many / few, 3),
                        "min": round(min(ratios), 3),
                        "max": round(max(ratios), 3),
                    },
                }
            )
            name = f"peak of 1,000 clients over that of 100, {adaptation}, {workers} worker{'s' * (workers > 1)}"
            goals.append(common.goal(name, many / few, most=1.05))
    common.emit("Memory", [{"title": "Peak resident size of the server's process", "rows": rows}], goals)


if __name__ == "__main__":
    main()
