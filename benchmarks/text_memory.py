"""What a language model remembers of 200 rows: canaries and regurgitation by rank, passes and DP-SGD.

    python benchmarks/text_memory.py
    python benchmarks/text_memory.py --only DP-SGD "rank 1"

Four clients have 200 questions of banking77 as running text, in equal parts and blocks of 32 tokens. They train a Llama
of 260,032 parameters that was pretrained on stories, for 5 rounds. Then ``fedfm audit`` attacks each run. The
intervals are those of the findings, exact ones at 95 %. The last line of the output has all numbers as JSON.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import common

import fedfm
from fedfm import seeds

ROWS = {"train": 200, "test": 400}
ATTACKS = ("text_canaries", "regurgitation")
DP_SGD = {"unit": "record", "mechanism": "dp_sgd", "target_epsilon": 8.0, "delta": 1e-3, "clip_norm": 1.0}
CASES: dict[str, dict[str, Any]] = {  # adaptation, epochs of a round, [privacy]
    "full": {"adaptation": {"name": "full"}, "epochs": 8},
    "LoRA, rank 16": {"adaptation": {"name": "lora", "rank": 16, "targets": "all-linear"}, "epochs": 8},
    "LoRA, rank 1": {"adaptation": {"name": "lora", "rank": 1, "targets": "all-linear"}, "epochs": 8},
    "LoRA, rank 16, 1 epoch": {"adaptation": {"name": "lora", "rank": 16, "targets": "all-linear"}, "epochs": 1},
    "LoRA, rank 16, 1 epoch, DP-SGD with epsilon 8": {
        "adaptation": {"name": "lora", "rank": 16, "targets": "all-linear"},
        "epochs": 1,
        "privacy": DP_SGD,
    },
}


def rows_file(folder: Path) -> Path:
    """A file with some rows of banking77, drawn at random."""
    with gzip.open(common.SHARED / "text" / "banking77.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    path, drawn = folder / "banking77.jsonl", []
    for split, count in ROWS.items():
        own = [row for row in rows if row["split"] == split]
        chosen = seeds.generator(0, "benchmark", split).permutation(len(own))[:count]
        drawn += [{"text": own[i]["text"], "split": split} for i in chosen]
    path.write_text("".join(json.dumps(row) + "\n" for row in drawn))
    return path


def experiment(rows: Path, case: dict[str, Any], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "data": {"path": str(rows), "partition": {"name": "iid", "clients": 4}},
        "model": {
            "name": str(common.SHARED / "weights" / "stories260K-llama"),
            "task": "language_modelling",
            "max_length": 32,
            "adaptation": case["adaptation"],
        },
        "method": {
            "name": "fedavg",
            "rounds": rounds,
            "local": {"name": "adamw", "learning_rate": 0.003, "batch_size": 8, "epochs": case["epochs"]},
        },
        "run": {"workers": 1},
    }
    return found | ({"privacy": case["privacy"]} if "privacy" in case else {})


def brief(finding: Any) -> str:
    low, high = (100 * value for value in (finding.low, finding.high))
    return f"{100 * finding.estimate:.1f} [{low:.1f}, {high:.1f}], {finding.verdict}"


def main() -> None:
    options = common.arguments(__doc__, only={"nargs": "+", "default": [""], "help": "cases with one of these texts"})
    if not common.SHARED.exists():
        raise SystemExit(f"skipped: no {common.SHARED}")
    folder, found = common.scratch(), dict[str, Any]()
    rows = rows_file(folder)
    print("| training | test perplexity | texts once, % first of 100 | exposure: once, 4 times | rows written, % "
          "| held-out rows, % |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for i, (label, case) in enumerate(CASES.items()):
        if not any(text in label for text in options.only):
            continue
        result = fedfm.run(experiment(rows, case, 1 if options.quick else 5), folder / str(i))
        canaries, rate = fedfm.audit(folder / str(i), ATTACKS)
        by_copies, held = canaries.detail["by_copies"], rate.detail["by_tokens"]["10"]["held_out_rows"]
        exposures = ", ".join(f"{of['exposure']:.2f}" for of in by_copies.values())
        print(f"| {label} | {result['perplexity']:.1f} | {brief(canaries)} | {exposures} | {brief(rate)} "
              f"| {100 * held['written'] / held['rows']:.1f} |", flush=True)  # fmt: skip
        figures = {"perplexity": result["perplexity"], "epsilon": result["epsilon"]}
        found[label] = figures | {f.name: f.to_dict() for f in (canaries, rate)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
