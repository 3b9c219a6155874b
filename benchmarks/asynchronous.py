"""Buffered asynchronous rounds and rounds that wait for all, where one of eight clients is ten times slower.

    python benchmarks/asynchronous.py
    python benchmarks/asynchronous.py --own-classes    # one of five clients is slow, and only it has two classes

Every line trains on the same number of updates. Times are those of a simulated clock: a local pass takes |N(0, 1)|, and
a pass of the slow client ten times as long. They do not depend on this machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import fedfm
from fedfm.runtime.progress import Progress

UPDATES, SEEDS, SLOW = 320, (0, 1, 2), {"client-07": 0.1}
OWNER, FIVE = (
    "client-04",
    300,
)  # the slow one of five silos, whose classes no other has; number of updates in a run of the five


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


def score_of_owner(buffer: int, seed: int, speed: float, staleness: float) -> tuple[float, float, float]:
    """(accuracy, accuracy on the test rows of the classes that only the slow silo has, clock) of one run."""
    late = {"buffer": buffer, "staleness": staleness, "speeds": {OWNER: speed}}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        result = fedfm.run(
            {
                "data": {"name": "digits", "partition": {"name": "by_class", "classes_per_client": 2, "clients": 5}},
                "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
                "method": {"name": "fedavg", "rounds": FIVE // buffer, "local": {"learning_rate": 0.03}},
                "run": {"seed": seed, "workers": 1, "evaluate_every": 0, "asynchronous": late},
            },
            out,
            progress=Progress(),
        )
        rows = json.loads((out / "manifest.json").read_text())["split"]["clients"]
    own = [k for k, count in enumerate(rows[OWNER]["train"]["by_class"]) if count]
    assert not any(rows[client]["train"]["by_class"][k] for client in rows if client != OWNER for k in own)
    confusion, details = result["details"]["confusion"], result["details"]
    right = sum(confusion[k][k] for k in own) / sum(sum(confusion[k]) for k in own)
    return result["accuracy"], right, details["asynchronous"]["clock"]


def own_classes() -> None:
    """Print a table of the accuracy on classes that only a slow silo has."""
    print("| a round takes | its speed | `staleness` | accuracy, % | on its classes, % | clock |")
    print("|---|---|---|---|---|---|")
    paces = [(1.0, 0.5), (0.3, 0.5), (0.3, 0.0), (0.1, 0.5), (0.1, 0.0)]
    for buffer, speed, staleness in [(5, 0.1, 0.5), *((buffer, *pace) for buffer in (3, 1) for pace in paces)]:
        found = [score_of_owner(buffer, seed, speed, staleness) for seed in SEEDS]
        accuracy, own, clock = (statistics.mean(values) for values in zip(*found, strict=True))
        what = "all 5" if buffer == 5 else f"the first {buffer}"
        print(
            f"| {what} | {speed:g} | {staleness:g} | {100 * accuracy:.1f} | {100 * own:.1f} | {clock:.0f} |", flush=True
        )


def main() -> None:
    """Print a table."""
    if "--own-classes" in sys.argv[1:]:
        own_classes()
        return
    local = {"learning_rate": 0.03}
    print(
        "| method | a round takes | accuracy, % | clock | ratio to the clock without a slow client |"
        "\n|---|---|---|---|---|"
    )
    momenta = {"fedavg": {}, "fedavgm": {}, "fedavgm, momentum 0.3": {"server_momentum": 0.3}}
    for name, more in momenta.items():
        method = {"name": name.split(",")[0], "local": local} | more
        usual = [line(method, None, seed, {})[1] for seed in SEEDS]
        for buffer in (None, 6, 4, 2, 1):
            found = [line(method, buffer, seed, SLOW) for seed in SEEDS]
            accuracy, clock = (statistics.mean(values) for values in zip(*found, strict=True))
            what = "all 8" if buffer is None else f"the first {buffer}"
            print(f"| {name} | {what} | {100 * accuracy:.1f} | {clock:.0f} | {clock / statistics.mean(usual):.2f} |")


if __name__ == "__main__":
    main()
