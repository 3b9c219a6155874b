"""The page docs/results/gpu.md from docs/results/gpu.json, where gpu_round.py writes each case.

A case has its command, date, machine, versions and rows. Rows of another day or machine keep a note of their own. The
part "suite" is of `make test-gpu`, and is written by hand after it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import common

Case = Mapping[str, Any]
TITLES = {
    "8B": "An 8 B model (the shape of Llama 3.1 8B), one client of 32 rows of 1,024 tokens, batch 16, two rows at once",
    "1B": "A 1.2 B model (the shape of Llama 3.2 1B), two clients of 64 rows of 512 tokens, batch 8",
}
INTRODUCTION = """# On a GPU

Made from `gpu.json` by `python docs/generate.py`; do not edit.

Measured on {date} on one {gpu}, with {cores} cores of an {cpu}; {versions}. The weights are random: the shapes decide
seconds and memory.

## A round of LoRA compared with TRL and FlowerTune

LoRA of rank 16 on all linear maps, AdamW, gradient checkpointing, products in bfloat16. The *TRL loop* loads the model
once and trains each client by TRL's SFTTrainer. *FlowerTune* is what a client of Flower's FlowerTune templates does
with a message: load the model, wrap it, train by SFTTrainer, give the adapter back. Flower's own messages are left out,
in its favour. The peak is what torch allocated at most.
"""
SUITE = """## What runs on a GPU

`make test-gpu` runs what only a GPU shows: every method against its own run on the CPU, both precisions, quantised
bases, checkpointing, compiled blocks, a batch that finds no memory, DP-SGD, hidden sums, audits, two processes on one
GPU, and silos on loopback. On this machine {passed} of its {tests} tests passed. {failed}

A small model gains nothing from a GPU: ten rounds of the built-in example took {gpu_seconds:g} s here, and
{cpu_seconds:g} s on two cores.

Not measured: {missing}.
"""


def wrap_lines(text: str) -> str:
    """Paragraphs in lines of 120 characters; headings as they are."""
    return "\n\n".join(textwrap.fill(part, 120, break_long_words=False) for part in text.strip().split("\n\n"))


def page(kept: Mapping[str, Any]) -> str:
    """The document."""
    cases = {name: kept[name] for name in TITLES if name in kept}
    first = next(iter(cases.values()))
    machine = first["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    about = {"date": first["date"], "versions": versions}
    parts = [wrap_lines(INTRODUCTION.format(**about, **machine))]
    for name, case in cases.items():
        parts += [f"{TITLES[name]}\n(`{case['command']}`):", common.markdown(table_rows(case["rows"])), *notes_of(case)]
    return "\n\n".join([*parts, wrap_lines(SUITE.format(**kept["suite"]))]) + "\n"


def table_rows(rows: Sequence[Case]) -> list[dict[str, Any]]:
    """Rows as the page has them."""
    return [
        {
            "base": row["base"],
            "side": row["side"],
            "seconds a round": _seconds(row["seconds a round"]),
            "peak, GB": f"{row['peak, GB']:.2f}",
        }
        for row in rows
    ]


def goals(case: Case) -> list[dict[str, Any]]:
    """The goals: each row of fedfm takes at most a tenth more time and memory than the loop."""
    loops = {row["base"]: row for row in case["rows"] if row["side"] == "TRL loop"}
    out = []
    for row in case["rows"]:
        if row["side"].startswith("fedfm") and row["base"] in loops:
            loop, of = loops[row["base"]], f"{row['base']}, {row['side'].partition(', ')[2]}".removesuffix(", ")
            seconds = row["seconds a round"]["median"] / loop["seconds a round"]["median"]
            out.append(common.goal(f"seconds a round, {of}, times the TRL loop", seconds, most=1.1))
            out.append(
                common.goal(f"peak of memory, {of}, times the TRL loop", row["peak, GB"] / loop["peak, GB"], most=1.1)
            )
    return out


def notes_of(case: Case) -> list[str]:
    """What follows from the rows: parts of the loop, what was computed before, notes."""
    ours = [row for row in case["rows"] if row["side"] == "fedfm"]
    out = []
    for row in ours:
        seconds, peak = (g["measured"] for g in goals({"rows": [row, *_loops(case)]}))
        out.append(f"With {row['base']} fedfm takes {seconds:.2f} of the loop's time and {peak:.2f} of its memory.")
    if "planned, GB" in case:
        out.append(
            "Before the run, `benchmarks/large_model_memory.py` computes "
            + " and ".join(f"{gb:.2f} GB ({base})" for base, gb in case["planned, GB"].items())
            + "."
        )
    return [wrap_lines(text) for text in [" ".join(out)] * bool(out) + list(case.get("notes", []))]


def _loops(case: Case) -> list[Case]:
    return [row for row in case["rows"] if row["side"] == "TRL loop"]


def _seconds(of: Mapping[str, float]) -> str:
    """The median, and the range where there are several rounds."""
    alone = of["min"] == of["max"]
    return f"{of['median']:.2f}" + ("" if alone else f" ({of['min']:.2f} to {of['max']:.2f})")
