"""Clocks that jump: by an hour, forwards and back, of a whole machine and of one silo alone.

Each process loads ``clock.c`` before libc, which shifts the time of day and leaves monotonic clocks as they are, as on
a machine whose time is set. libfaketime is of no use for it: it shifts the deadlines of monotonic sleeps, too, and
``time.sleep`` then fails. Needs a C compiler.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from gate import Gate, Outcome, scale_tries

import processes
from processes import begin, experiment, fedfm, rounds, same, until

JUMPS = (3600, -3600, 0, 86400, -7200)  # seconds


def library(folder: Path) -> Path:
    """The compiled ``clock.c``."""
    made = folder / "clock.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(made), str(Path(__file__).with_name("clock.c")), "-ldl"]
    subprocess.run(command, check=True)
    return made


def shifted_environment(library: Path, file: Path) -> dict[str, str]:
    """The environment of processes whose clock is off by the seconds that the file says."""
    return {"LD_PRELOAD": str(library), "CAMPAIGN_CLOCK": str(file)}


def one_process(folder: Path, found: Outcome, times: int) -> None:
    """A run on the local engine, with a jump after each round."""
    exp = experiment(folder, method='name = "scaffold"\nrounds = 12\nlocal = { epochs = 2 }', run="workers = 2")
    alone, clock = fedfm("run", exp, "--out", folder / "alone"), folder / "clock"
    clock.write_text("0")
    environment = dict(processes.ENV)
    processes.ENV.update(shifted_environment(library(folder), clock))
    try:
        for number in range(times):
            out = folder / f"jumps-{number}"
            running = begin("run", exp, "--out", out)
            done = 0
            while running.poll() is None:
                if rounds(out) > done:
                    done = rounds(out)
                    clock.write_text(str(JUMPS[(number + done) % len(JUMPS)]))
                    found.count("jumps during a run on the local engine")
                time.sleep(0.01)
            text = running.communicate()[1]
            if running.returncode:
                found.failures.append(f"a run whose clock jumps ends with {running.returncode}: {text[-300:]}")
                continue
            clock.write_text("0")
            try:
                same(fedfm("resume", out), alone)
            except AssertionError:
                found.failures.append("a run whose clock jumps has other bits")
    finally:
        processes.ENV.clear()
        processes.ENV.update(environment)


def federation(folder: Path, found: Outcome, alone_at: str | None) -> None:
    """Kits whose clocks jump: those of all, or of one silo alone, which is right again after a while."""
    import kit_sites as kits

    made, clock = library(folder), folder / "clock"
    clock.write_text("0")
    with kits.sites(folder, rounds=5) as at:
        alone = fedfm("run", at.alone, "--out", folder / "local")
        environment = dict(processes.ENV)
        for name in ("server", *kits.SILOS):
            processes.ENV.update(shifted_environment(made, clock) if alone_at in (None, name) else {})
            at.start(name)
            processes.ENV.clear()
            processes.ENV.update(environment)
        running = at.begin()
        for jump in JUMPS[:3]:
            done = rounds(at.folder / "run")
            until(lambda done=done: rounds(at.folder / "run") > done or running.poll() is not None, 300)
            clock.write_text(str(jump))
            found.count("jumps of a federation's machine" if alone_at is None else "jumps of one silo's clock")
            time.sleep(15)
            if alone_at is not None:
                clock.write_text("0")
        try:
            result = at.result(running, 500)
        except BaseException as error:
            found.failures.append(f"a federation whose clocks jump ({alone_at or 'all'}): {str(error)[-300:]}")
            return
        found.require(kits.bits(result) == kits.bits(alone), f"clocks that jump ({alone_at or 'all'}): other bits")


def attempt(size: float, folder: Path, progress: Callable[[str], None]) -> Outcome:
    """Let clocks jump."""
    if shutil.which("cc") is None:
        return Outcome(skipped="there is no C compiler")
    found = Outcome()
    progress("local engine")
    one_process(folder, found, scale_tries(10, size))
    for number, alone_at in enumerate((None, "hospital-b")):
        progress(f"federation: {alone_at or 'all clocks'}")
        place = folder / f"kits-{number}"
        place.mkdir()
        federation(place, found, alone_at)
    return found


GATE = Gate("the run ends with the bits of a run whose clock never jumped", attempt)
