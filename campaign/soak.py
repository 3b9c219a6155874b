"""A thousand rounds in which a tenth of the clients fail: no memory, no open file and no process is left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gate import Gate, Outcome, scale_tries

import fedfm
from small import experiment

ROUNDS = 1_000


class Watch(fedfm.Progress):
    """Notes what the process has after each round."""

    def __init__(self) -> None:
        super().__init__()
        self.usages: list[tuple[int, int, int]] = []  # resident bytes, open files, threads

    def round(self, line: Any) -> None:
        self.usages.append(usage())


def usage() -> tuple[int, int, int]:
    """Resident bytes, open files and threads of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def attempt(size: float, folder: Path, progress: Callable[[str], None]) -> Outcome:
    """Run it, and compare the last rounds with the first hundred."""
    torch.set_num_threads(1)
    found, rounds = Outcome(), scale_tries(ROUNDS, size, least=40)
    folder.mkdir(exist_ok=True)
    method = {"name": "flaky:Flaky", "rounds": rounds, "fraction": 1.0}
    tables = experiment(folder, method=method, run={"workers": 1, "min_clients": 1})
    watch = Watch()
    result = fedfm.run(tables, folder / "run", progress=watch)
    found.count("rounds", result["rounds"])
    found.count("clients that failed", len(result["excluded"]))
    found.require(result["rounds"] == rounds, f"{rounds - result['rounds']} rounds are missing")
    first, last = watch.usages[max(rounds // 10 - 1, 0)], watch.usages[-1]
    drift = last[0] / first[0] - 1
    found.require(drift < 0.05, f"resident memory grew by {100 * drift:.1f} %")
    found.require(last[1:] <= first[1:], f"open files, threads: {first[1:]} and then {last[1:]}")
    found.figures = {"growth of memory": f"{100 * drift:.2f} %"}
    return found


GATE = Gate("memory grows by less than 5 %, files and threads by none, and no round is lost", attempt)
