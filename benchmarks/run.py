"""All benchmarks, each in a process of its own, into docs/results/performance.md.

    python benchmarks/run.py
    python benchmarks/run.py --only messages heads
    python benchmarks/run.py --quick --out /tmp/performance.md

What one benchmark measured last on a kind of processor is kept beside the page (performance.json), so that ``--only``
renews a part of it, and what was measured elsewhere stays.
"""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import common

HERE = Path(__file__).resolve().parent
SCRIPTS: dict[str, list[str]] = {
    "heads": ["heads.py"],
    "lora": ["lora.py", "--model", "minilm", "--rows", "64", "--rounds", "3"],
    "lora_last_layers": ["lora.py", "--model", "minilm", "--layers", "2", "--rows", "64", "--rounds", "3"],
    "lora_nano_vit": ["lora.py", "--model", "nano-vit", "--batch-size", "32", "--rounds", "5"],
    "lora_vit_tiny": ["lora.py", "--model", "vit-tiny", "--clients", "4", "--cohort", "4", "--rows", "16"],
    "real_models": ["real_models.py", "--turns", "1"],
    "quantised_bases": ["quantised_bases.py"],
    "causal": ["causal.py"],
    "flower_lora": ["flower_lora.py"],
    "messages": ["messages.py"],
    "data_at_scale": ["data_at_scale.py"],
    "many_clients": ["many_clients.py"],
    "tasks": ["tasks.py"],
    "start": ["start.py"],
    "memory": ["memory.py"],
    "workers": ["workers.py"],
    "fedbaf_step": ["fedbaf_step.py"],
    "fedbip_server": ["fedbip_server.py"],
    "fedms": ["fedms.py"],
    "mixtures": ["mixtures.py", "--dims", "192", "384"],
    "secagg": ["secagg.py"],
    "secagg_compact": ["secagg_compact.py"],
    "dp_sgd": ["dp_sgd.py"],
    "encrypted_block": ["encrypted_block.py"],
    "encrypted_mlp": ["encrypted_mlp.py"],
    "blind_protocols": ["blind_protocols.py"],
}
FAST, BF16 = ("fedfm, fast", "float32"), ("fedfm, fast_bf16", "bf16")
LORA_GOALS: dict[tuple[str, int | None], tuple[float, ...]] = {  # (model, layers) -> float32, bf16
    ("minilm", None): (4, 6),
    ("minilm", 2): (10,),
    ("nano-vit", None): (2, 2.5),
    ("vit-tiny", None): (2, 3),
}
INTRODUCTION = """# Performance

Made by `make bench`; do not edit. Every ratio sets two things side by side that ran in turn in one sitting of one
process, unless a section says otherwise; it is the ratio of medians, with the least and the largest of any turn behind
it. Timings of a shared machine scatter: compare ratios, not seconds. CPU seconds are user plus system. Nothing here is
asserted by a test.

Ratios depend on the processor: where a peer's matrix products run at the processor's peak already, as MKL's do on an
Intel Xeon, what is left to gain is what else it spends."""


def execute(name: str, quick: bool, limit: float) -> dict[str, Any]:
    """The result of one script, or why there is none."""
    command = [*SCRIPTS[name], *(["--quick"] if quick and not name.startswith("lora") else [])]
    print("python benchmarks/" + " ".join(command), flush=True)
    shown, today = "python benchmarks/" + " ".join(command), datetime.date.today().isoformat()
    try:
        out = subprocess.run(
            [sys.executable, str(HERE / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"command": shown, "date": today, "skipped": f"not finished within {limit:g} s"}
    objects = [line for line in out.stdout.splitlines() if line.startswith("{")]
    if out.returncode or not objects:
        why = (out.stderr or out.stdout).strip().splitlines()[-1:] or [f"exit status {out.returncode}"]
        return {"command": shown, "date": today, "skipped": why[0][:300]}
    result = json.loads(objects[-1])
    if "rounds" in result:  # lora.py, which has a form of its own
        rows = [{"LoRA, " + result["arguments"]["model"]: variant, **row} for variant, row in result["rounds"].items()]
        tables = [{"title": "A cohort's LoRA; ratio: CPU time of the hand-written loop over its own", "rows": rows}]
        title = f"LoRA of {result['arguments']['model']}"
        if result["arguments"]["layers"]:
            title += f", last {result['arguments']['layers']} layers"
        result = {"title": title, "tables": tables, "goals": lora_goals(result), "notes": []}
        result |= {"machine": common.machine(), "versions": common.versions()}
    return result | {"command": shown, "date": today}


def lora_goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Times the hand-written loop; the vision models' were set after the first measurements."""
    layers = result["arguments"]["layers"]
    wanted = LORA_GOALS.get((result["arguments"]["model"], layers), ())
    where = f", last {layers} layers" if layers else ""
    return [
        common.goal(f"times the hand-written loop, {kernels}{where}", result["rounds"][row]["ratio"], least=least)
        for (row, kernels), least in zip((FAST, BF16), wanted, strict=False)
    ]


def page(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The whole document, of results by benchmark and processor."""
    parts = [INTRODUCTION]
    if rows := goals(results):
        parts.append("## Goals\n\n" + common.markdown(rows))
    for name in SCRIPTS:
        found = results.get(name, {})
        if not found:
            continue
        latest = max(found.values(), key=lambda result: result["date"])
        parts.append(f"## {latest.get('title', name.capitalize())}\n\n`{latest['command']}`")
        for cpu in sorted(found):
            if len(found) > 1:
                parts.append(f"### On {cpu}")
            parts += result_lines(found[cpu])
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(parts)) + "\n"


def goals(results: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row a goal, a column a processor."""
    processors = sorted({cpu for found in results.values() for cpu in found})
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name in SCRIPTS:
        for cpu, result in sorted(results.get(name, {}).items()):
            for g in result.get("goals", []):
                start = {"benchmark": name, "goal": g["goal"], "wanted": g["wanted"]} | dict.fromkeys(processors, "")
                row = rows.setdefault((name, g["goal"], g["wanted"]), start)
                row[cpu] = f"{g['measured']:.3g}, {common.verdict(g)}"
    return list(rows.values())


def result_lines(result: dict[str, Any]) -> list[str]:
    """Tables, notes, and what it was measured on."""
    if "skipped" in result:
        return [f"Not measured: {result['skipped']}"]
    parts = [f"{table['title']}:\n\n{common.markdown(table['rows'])}" for table in result["tables"]]
    if result.get("notes"):
        parts.append("\n".join(f"- {note}" for note in result["notes"]))
    machine, versions = result["machine"], ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    parts.append(
        f"Measured {result['date']} on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"load average {machine['load']} (shared with other work where that is above what ran); {versions}."
    )
    return parts


def main() -> None:
    options = common.arguments(
        __doc__,
        only={"nargs": "+", "choices": list(SCRIPTS), "default": list(SCRIPTS)},
        out={"type": Path, "default": common.ROOT / "docs" / "results" / "performance.md"},
        limit={"type": float, "default": 3600.0, "help": "seconds that one benchmark may take"},
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    kept = options.out.with_suffix(".json")
    results = json.loads(kept.read_text()) if kept.exists() else {}
    cpu = common.machine()["cpu"]
    for name in options.only:
        result = execute(name, options.quick, options.limit)
        results.setdefault(name, {})[cpu] = result
        if "skipped" in result:
            print(f"  not measured: {result['skipped']}")
        kept.write_text(json.dumps(results, indent=1) + "\n")
        options.out.write_text(page(results))
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
