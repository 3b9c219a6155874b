"""A hostile server's tries against one silo: nothing of its rows, files or code is reached, and the silo goes on.

The tries are those of ``tests/engines/test_hostile_tries.py``, family by family, and more of their random ones. An
idea is one entry of the lists there: a way to name code, a head that is none, an experiment that is a bomb or that
changes in the middle of a run, a handler or a kind of message, a name of a run that is a path. Each test of
:data:`SCRIPTS` is an idea more: questions whose answers or refusals would tell of rows, servers that cheat in a sum.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import test_hostile_tries as tries
from gate import ROOT, Gate, Outcome, scale_tries

from fedfm.core.wire import flower_records, payload

RANDOM = 20_000  # messages that are changed at random
SCRIPTS = ("engines/test_oracles.py", "engines/test_hostile_server.py", "aggregation/test_secure_hostile.py")


def attempt(size: float, folder: Path, progress: Callable[[str], None]) -> Outcome:
    """Try everything once, and random changes as often as the size says."""
    found = Outcome()
    with pytest.MonkeyPatch.context() as patch:
        silo = tries.Silo(folder)
        patch.setattr(tries.client_stub, "call", silo.worker)
        start = tries.w.__wrapped__(silo) if hasattr(tries.w, "__wrapped__") else tries.w._get_wrapped_function()(silo)
        for family in tries.FAMILIES:
            progress(family.__name__.replace("_", " "))
            before = silo.tries
            try:
                family(silo, start)
            except AssertionError as error:
                found.failures.append(f"{family.__name__}: {str(error)[:300]}")
            found.count("tries", silo.tries - before)
        try_random_changes(silo, start, scale_tries(RANDOM, size), found)
    lists = (tries.CODE, tries.HEADS, tries.bombs(), tries.CHANGED, tries.KINDS, tries.NAMES)
    found.count("ideas", sum(map(len, lists)) + len(tries.PATHS) - len(tries.CODE))
    progress("scripts of servers that ask and cheat")
    scripts(found)
    found.require(not silo.mark.exists(), "code of the server ran at the silo")
    found.require(not silo.imported, f"modules were imported: {sorted(silo.imported)[:3]}")
    home = str(silo.home)
    written = [e for e in silo.events if e[0] == "write" and not e[1].startswith(home)]
    found.require(not written, f"files outside of the silo's folder were written: {written[:3]}")
    started = [e for e in silo.events if e[0] not in ("read", "write")]
    found.require(not started, f"processes or connections were opened: {started[:3]}")
    return found


def scripts(found: Outcome) -> None:
    """Run the tests that play a server against silos and sums; each is an idea."""
    files = [str(ROOT / "tests" / name) for name in SCRIPTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    found.require(done.returncode == 0, f"scripts: {done.stdout.strip()[-300:]}")
    found.count("ideas", int(passed[1]) if passed else 0)


def try_random_changes(silo: tries.Silo, start: object, times: int, found: Outcome) -> None:
    """Well-formed messages, changed at random."""
    rng = random.Random(1)
    head, pieces = payload.encode({"round": 1, "call": 1, "body": {"w": start}})
    data = b"".join(pieces)
    for _ in range(times):
        text, block = bytearray(head.encode()), bytearray(data)
        for _ in range(rng.randint(1, 4)):
            part = text if rng.random() < 0.5 else block
            part[rng.randrange(len(part))] = rng.randrange(256)
        try:
            silo.ask(flower_records.pack(text.decode(errors="replace"), bytes(block)), tries.TRAIN, tries.HONEST)
        except AssertionError as error:
            found.failures.append(f"a changed message: {str(error)[:200]}")
            return
        except Exception as error:
            found.failures.append(f"a changed message ends the site: {type(error).__name__}: {str(error)[:200]}")
            return
    found.count("messages changed at random", times)


GATE = Gate("no code, file, process or row is reached; what is answered is on the silo's ledger", attempt)
