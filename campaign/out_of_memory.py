"""A client that takes more memory than there is: the kernel kills its worker, and the run goes on without it.

A control group limits the memory, which takes root and Linux's control groups (version 1 or 2).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gate import ROOT, Gate, Outcome, scale_tries

import processes
from processes import experiment

LIMIT = 3 << 30  # bytes of a run with its two workers
GROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_limit() -> Iterator[Path | None]:
    """A control group of so much memory; None: there can be none."""
    for folder, limits in (
        (GROUPS / "memory/fedfm-campaign", ("memory.limit_in_bytes",)),
        (GROUPS / "fedfm-campaign", ("memory.max",)),
    ):
        try:
            folder.mkdir()
            for name in limits:
                (folder / name).write_text(str(LIMIT))
        except OSError:
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        try:
            yield folder
        finally:
            for _ in range(100):
                try:
                    folder.rmdir()
                    break
                except OSError:
                    time.sleep(0.1)
        return
    yield None


def attempt(size: float, folder: Path, progress: Callable[[str], None]) -> Outcome:
    """Runs in which one of three clients fills the memory in every round."""
    found, group = Outcome(), None
    environment = dict(processes.ENV)
    path = os.pathsep.join([str(ROOT / "campaign"), processes.ENV.get("PYTHONPATH", "")])
    try:
        processes.ENV["PYTHONPATH"] = path
        with memory_limit() as group:
            if group is None:
                return Outcome(skipped="no control group can be made here: that takes root")
            for number in range(scale_tries(5, size)):
                progress(f"run {number + 1}")
                place = folder / str(number)
                place.mkdir()
                who = f"client-0{number % 3}"
                method = f'name = "greedy:Greedy"\nrounds = 3\nwho = "{who}"'
                exp = experiment(place, method=method, run="workers = 2\nmin_clients = 2")
                result = inside(group, "run", exp, "--out", place / "run")
                left_out = {(e["round"], e["client"]) for e in result.get("excluded", ())}
                wanted = {(t, who) for t in (1, 2, 3)}
                found.count("rounds out of memory", 3)
                found.require(wanted <= left_out, f"{who} is not named: {result.get('excluded', result)}")
                found.require(not {c for _, c in left_out} - {who}, f"others are left out too: {left_out}")
                reasons = " ".join(e["reason"] for e in result.get("excluded", ()))
                found.require("out of memory" in reasons, f"the reason is not said: {reasons[:200]}")
    finally:
        processes.ENV.clear()
        processes.ENV.update(environment)
    return found


def inside(group: Path, *args: object) -> dict:
    """The command line's result line, in a control group."""
    enter = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    command = ["sh", "-c", enter, "sh", sys.executable, "-m", "fedfm", *map(str, args), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=processes.ENV, check=False)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else {"excluded": [], "error": done.stderr[-300:]}


GATE = Gate("the client is left out by name and reason, and the others' run goes on", attempt)
