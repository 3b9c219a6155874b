"""Buffered asynchronous rounds and rounds that wait for all, where one of eight clients is ten times slower.

    python benchmarks/asynchronous.py

Every line trains on the same number of updates. Time is that of the simulated clock: a pass takes |N(0, 1)|, of the
slow client ten times as long. It says nothing of this machine.
"""

from __future__ import annotations

import statistics

import fedfm
from fedfm.runtime.progress import Progress

UPDATES, SEEDS, SLOW = 320, (0, 1, 2), {"client-07": 0.1}


def line(method: dict[str, object], buffer: int | None, seed: int, speeds: dict[str, float]) -> tuple[float, float]:
    """(accuracy, clock) of one run; without a buffer a round waits for all."""
    late = {"buffer": buffer or 8, "speeds": speeds}
    result = fedfm.run(
        {
            "data": {"name": "digits", "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 8}},
            "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
            "method": method | {"rounds": UPDATES // (buffer or 8)},
            "run": {"seed": seed, "workers": 1, "evaluate_every": 0, "asynchronous": late},
        },
        progress=Progress(),
    )
    return result["accuracy"], result["details"]["asynchronous"]["clock"]


def main() -> None:
    """Print a table."""
    local = {"learning_rate": 0.03}
    print("| method | a round takes | accuracy, % | clock | of that without a slow client |\n|---|---|---|---|---|")
    for name in ("fedavg", "fedavgm"):
        usual = [line({"name": name, "local": local}, None, seed, {})[1] for seed in SEEDS]
        for buffer in (None, 6, 4, 2, 1):
            found = [line({"name": name, "local": local}, buffer, seed, SLOW) for seed in SEEDS]
            accuracy, clock = (statistics.mean(values) for values in zip(*found, strict=True))
            what = "all 8" if buffer is None else f"the first {buffer}"
            print(f"| {name} | {what} | {100 * accuracy:.1f} | {clock:.0f} | {clock / statistics.mean(usual):.2f} |")


if __name__ == "__main__":
    main()
