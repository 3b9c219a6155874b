"""The campaign: every gate of reliability and security at full size, into docs/results/campaign.md.

    make campaign                                     all gates, one after another; some hours on two cores
    python campaign/run.py --only mutations kills     some of them
    python campaign/run.py --size 0.01                a hundredth of the tries: does it run

Each gate runs in a process of its own. What it found last is kept in docs/results/campaign.json, from which the page is
written; a run of another size than 1 writes neither. The exit status is 1 if a gate does not hold. The tests of the
suite try the same in small.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gate import ROOT  # makes the helpers of the tests importable

HERE = Path(__file__).resolve().parent
PAGE = ROOT / "docs/results/campaign.md"
GATES = {
    "kills": "Processes are killed",
    "mutations": "Messages are damaged",
    "ciphertexts": "Ciphertexts are changed",
    "hostile": "A server is hostile",
    "sums": "Clients drop out of secure sums, and servers cheat",
    "clocks": "Clocks jump",
    "out_of_memory": "Memory is full",
    "network": "The network is cut in a message",
    "soak": "A thousand rounds",
}
HEADER = """# The campaign

Made by `make campaign`, whose draws come from fixed seeds; do not edit. Each gate was tried at its full size on the day
that its row names. A gate holds if nothing failed; what failed is listed below the table. "not tried yet" means that
nobody has run the gate at its full size. The suite's tests try the same in small.
"""


def one(name: str, size: float) -> None:
    """Try one gate in this process, and print its outcome as the last line."""
    gate = importlib.import_module(name).GATE
    began = time.monotonic()

    def progress(text: str) -> None:
        sys.stderr.write(f"{name}, {time.monotonic() - began:.0f} s: {text}\n")
        sys.stderr.flush()

    with tempfile.TemporaryDirectory(prefix=f"fedfm-{name}-") as folder:
        try:
            outcome = dataclasses.asdict(gate.attempt(size, Path(folder), progress))
        except Exception as error:
            outcome = {"tried": {}, "failures": [f"{type(error).__name__}: {str(error)[-500:]}"]}
            outcome |= {"figures": {}, "skipped": ""}
    print(json.dumps(outcome | {"goal": gate.goal, "seconds": round(time.monotonic() - began)}), flush=True)


def measure(name: str, size: float) -> dict[str, Any]:
    """The outcome of one gate, which runs in a process of its own."""
    command = [sys.executable, str(HERE / "run.py"), "--gate", name, "--size", str(size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        failures = [f"the gate's process ended with {done.returncode}"]
        return {"tried": {}, "failures": failures, "figures": {}, "skipped": "", "goal": "", "seconds": 0}
    return json.loads(lines[-1])


def machine() -> str:
    """The processor and the number of cores that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def page(results: dict[str, dict[str, Any]]) -> str:
    """The document."""
    rows = ["| gate | tried | must hold | result | minutes | day |", "|---|---|---|---|---|---|"]
    for name, title in GATES.items():
        if (found := results.get(name)) is None:
            rows.append(f"| {title} | | | not tried yet | | |")
            continue
        tried = ", ".join(f"{number:,} {what}" for what, number in found["tried"].items())
        tried += "".join(f"; {what}: {value}" for what, value in found["figures"].items())
        rows.append(
            f"| {title} | {tried} | {found['goal']} | {verdict(found)} | {found['seconds'] / 60:.1f} | {found['day']} |"
        )
    parts = [HEADER.strip(), "\n".join(rows)]
    parts += ["Machines: " + "; ".join(sorted({found["machine"] for found in results.values()})) + "."]
    failures = [f"- {GATES[name]}: {text}" for name, found in results.items() for text in found["failures"]]
    parts += ["## What failed\n\n" + "\n".join(failures)] if failures else []
    return "\n\n".join(parts) + "\n"


def verdict(found: dict[str, Any]) -> str:
    """The verdict in words."""
    if found["skipped"]:
        return f"not tried: {found['skipped']}"
    return f"{len(found['failures'])} failures" if found["failures"] else "holds"


def main() -> None:
    """Try gates, print a table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GATES, default=list(GATES), metavar="GATE", help=", ".join(GATES))
    parser.add_argument("--size", type=float, default=1.0, help="share of the full number of tries")
    parser.add_argument("--gate", choices=GATES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gate:
        one(options.gate, options.size)
        return
    store = PAGE.with_suffix(".json")
    results = json.loads(store.read_text()) if store.exists() else {}
    bad = 0
    for name in options.only:
        found = measure(name, options.size)
        found |= {"day": datetime.date.today().isoformat(), "machine": machine()}
        bad += bool(found["failures"])
        print(
            f"{GATES[name]}: {verdict(found)}; {found['tried']} {found['figures']} {found['failures'][:3]}", flush=True
        )
        if options.size == 1:
            results[name] = found
            store.write_text(json.dumps(results, indent=1) + "\n")
            PAGE.write_text(page(results))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
