"""Figures 5 and 6 of the paper: mean accuracy of clients on their own test rows, round by round.

    python reproduce/fedbip/convergence.py shared --rows local fedavg fedamp fedala fedbip     # after the runs

Accuracies are means over the seeds of the vision runs in per cent, from ``metrics.jsonl``. If the clients of a row have
no models of their own, the first line is the aggregate's, and a second line that of clients' models before aggregation.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

RUNS = Path(__file__).resolve().parents[1] / ".runs" / "fedbip"
KEYS = {"local_accuracy": "", "accuracy_before_aggregation": ", theta_i"}


def curves(row: str, point: str) -> dict[str, list[float]]:
    """For each line's name, the per cent after round 1, 2, ...: means over the seeds that have runs."""
    by_line: dict[str, list[list[float]]] = {}
    for path in sorted(RUNS.glob(f"vision__{row}.{point}-seed*/metrics.jsonl")):
        metrics = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for key, said in KEYS.items():
            values = [100 * m[key] for m in metrics if m["round"] and m.get(key) is not None]
            if values:
                by_line.setdefault(row + said, []).append(values)
    return {name: [statistics.fmean(at) for at in zip(*seeds, strict=True)] for name, seeds in by_line.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="+", help="domains, shared, contradict")
    parser.add_argument("--rows", nargs="+", default=["local", "fedavg", "fedamp", "fedala", "fedbip"])
    options = parser.parse_args()
    for point in options.points:
        found = {n: c for row in options.rows for n, c in curves(row, point).items()}
        if not found:
            raise SystemExit(f"{point}: no runs; python reproduce/run.py fedbip --only vision makes them")
        rounds = range(1, max(map(len, found.values())) + 1)
        print(f"| {point} | {' | '.join(map(str, rounds))} |\n|---|{'---|' * len(rounds)}")
        for name, curve in found.items():
            print(f"| {name} | {' | '.join(f'{a:.1f}' for a in curve)} |")
        print()


if __name__ == "__main__":
    main()
