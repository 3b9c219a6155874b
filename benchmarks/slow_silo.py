"""What a silo that is ten times slower costs a federation: seconds on the wall, on a SuperLink with eight SuperNodes.

    python benchmarks/slow_silo.py            # twenty minutes, two cores with nothing else to do
    python benchmarks/slow_silo.py --quick    # four silos, a fiftieth of the work

All runs train nano-vit with LoRA on digits. Each silo's process may compute in slices alone, one silo after the other,
and is stopped between them: 50 ms of every 500, the slow one 5. So it is slow at scores too, which each silo tells with
its answer. A round takes the first answers of half as many as there are silos. The clock begins when round 1 is over,
and ends before the last round, whose evaluation waits for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import common

CYCLE, SLICE = 0.5, 0.05  # seconds: all silos have had their slice once; a slice
SLOW, FACTOR = "client-00", 10
TOML = """\
[data]
name = "digits"
partition = {{ name = "iid", clients = {silos} }}

[model]
name = "nano-vit"
adaptation = {{ name = "lora", rank = 4 }}

[method]
name = "fedavg"
rounds = {rounds}
local = {{ epochs = {epochs} }}

[run]
engine = "deployment"
timeout = 3600
asynchronous = {{ buffer = {buffer} }}
"""


class Slices(threading.Thread):
    """Lets the silos of a run compute in turn, from its first metrics on."""

    def __init__(self, out: Path, slow: bool) -> None:
        super().__init__(daemon=True)
        self._out, self._slow, self.ended = out, slow, False

    def run(self) -> None:
        while not self.ended and not metrics(self._out):
            time.sleep(0.05)
        locks = sorted(self._out.glob("private/deployment/sites/*/*/worker.lock"))
        workers = {lock.parent.name: int(lock.read_text()) for lock in locks}
        for pid in workers.values():
            tell(pid, signal.SIGSTOP)
        while not self.ended:
            begun = time.monotonic()
            for name, pid in workers.items():
                tell(pid, signal.SIGCONT)
                time.sleep(SLICE / FACTOR if self._slow and name == SLOW else SLICE)
                tell(pid, signal.SIGSTOP)
            time.sleep(max(0.0, begun + CYCLE - time.monotonic()))
        for pid in workers.values():
            tell(pid, signal.SIGCONT)


def tell(pid: int, number: int) -> None:
    """A signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def metrics(out: Path) -> list[dict[str, float]]:
    """The lines so far."""
    path = out / "metrics.jsonl"
    whole = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in whole]


def seconds(out: Path, silos: int, rounds: int, epochs: int, buffer: int, *, slow: bool) -> float:
    """The seconds of ``rounds`` asynchronous rounds. One more round is run before them, and one after them."""
    out.mkdir()
    (out / "exp.toml").write_text(TOML.format(silos=silos, rounds=2 + rounds, epochs=epochs, buffer=buffer))
    slices = Slices(out / "run", slow)
    slices.start()
    command = [sys.executable, "-m", "fedfm", "run", str(out / "exp.toml"), "--out", str(out / "run")]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while running.poll() is None and len(metrics(out / "run")) < rounds + 2:
            time.sleep(0.5)
    finally:  # after Ctrl-C too: a stopped silo would never end
        slices.ended = True
        slices.join()
    if running.wait():
        raise SystemExit("the run failed")
    found = metrics(out / "run")
    return found[1 + rounds]["seconds"] - found[1]["seconds"]


def main() -> None:
    options = common.arguments(__doc__)
    silos, rounds, epochs = (4, 2, 2) if options.quick else (8, 20, 20)
    folder, rows, buffer = common.scratch(), [], silos // 2
    for slow in (False, True):
        spent = seconds(folder / str(slow), silos, rounds, epochs, buffer, slow=slow)
        rows.append(
            {
                "slow silos": "one" if slow else "nobody",
                "a round takes": f"the first {buffer}",
                "answers": rounds * buffer,
                "seconds": round(spent),
                "seconds a round": round(spent / rounds, 1),
                "seconds an answer": round(spent / rounds / buffer, 2),
            }
        )
    cost = rows[1]["seconds"] / rows[0]["seconds"]
    goals = [common.goal("wall time with a slow silo, times that without one", cost, most=1.2)]
    title = f"{silos} silos, one {FACTOR} times slower or none, a pass of {epochs} epochs"
    common.emit("A slow silo", [{"title": title, "rows": rows}], goals)


if __name__ == "__main__":
    main()
