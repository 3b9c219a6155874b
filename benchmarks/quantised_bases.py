"""LoRA on a base in 4 and 8 bits: accuracy, and the bytes that the frozen base takes, against bfloat16.

    python benchmarks/quantised_bases.py            # about ten minutes on one core
    python benchmarks/quantised_bases.py --quick    # four intents, one seed, one round

MiniLM on the first intents of banking77, four clients dealt evenly, LoRA of rank 8 with the head, FedAvg. The same
rows, seeds and settings with each base. The bytes are those of what stays frozen, without LoRA and the head; of MiniLM
half are embeddings, which stay in bfloat16, so its linear maps have a line of their own.
"""

from __future__ import annotations

import collections
import gzip
import json
import math
import statistics
from pathlib import Path
from typing import Any

import common
import torch
from scipy import stats

import fedfm

BASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "nf4": {"dtype": "bfloat16", "quantization": "nf4"},
}
CLIENTS, INTENTS, TRAINED = 4, 12, 40  # and training rows of an intent


def rows_of(path: Path, intents: int, folder: Path) -> Path:
    """A file of the first intents' rows, of each the first training rows and all test rows."""
    counts: collections.Counter[str] = collections.Counter()
    known: list[str] = []
    out = folder / "rows.jsonl"
    with gzip.open(path, "rt", encoding="utf-8") as lines, out.open("w", encoding="utf-8") as file:
        for line in lines:
            row = json.loads(line)
            name = row["label_name"]
            if name not in known and len(known) < intents:
                known.append(name)
            counts[name] += row["split"] == "train"
            if name in known and (row["split"] != "train" or counts[name] <= TRAINED):
                file.write(line)
    return out


def tables(base: str, seed: int, rounds: int, rows: Path) -> dict[str, Any]:
    """The experiment."""
    known = common.banking77(CLIENTS)
    return {
        "data": known["data"] | {"path": str(rows)},
        "model": known["model"] | {"adaptation": {"name": "lora", "rank": 8}, "max_length": 48} | BASES[base],
        "method": {
            "name": "fedavg",
            "rounds": rounds,
            "local": {"name": "adamw", "learning_rate": 2e-3, "epochs": 1, "batch_size": 16},
        },
        "run": {"seed": seed, "workers": 1, "evaluate_every": 0},
    }


def frozen(base: str, rows: Path) -> tuple[float, float]:
    """MB of the frozen tensors, and of the linear maps in the blocks alone."""
    from fedfm.config.experiment import Experiment
    from fedfm.runtime.population import populate

    model = populate(Experiment.from_dict(tables(base, 0, 1, rows))).model
    whole = maps = 0
    for name, tensor in model.module.named_parameters():
        if tensor.requires_grad:
            continue
        whole += tensor.nbytes
        maps += tensor.nbytes if "layer." in name and tensor.dim() > 1 else 0
    return whole / 1e6, maps / 1e6


def main() -> None:
    options = common.arguments(__doc__)
    torch.set_num_threads(1)
    seeds, rounds = (range(1), 1) if options.quick else (range(3), 5)
    try:
        source = Path(common.banking77(CLIENTS)["data"]["path"])
        import bitsandbytes  # noqa: F401
    except (FileNotFoundError, ImportError) as why:
        common.skip(str(why))
    intents, folder, rows, found = 4 if options.quick else INTENTS, common.scratch(), [], dict[str, list[float]]()
    table = rows_of(source, intents, folder)
    for base in BASES:
        runs = [fedfm.run(tables(base, seed, rounds, table), folder / f"{base}-{seed}") for seed in seeds]
        found[base] = [100 * run["accuracy"] for run in runs]
        whole, maps = frozen(base, table)
        rows.append(
            {
                "base": base,
                "accuracy, %": round(statistics.mean(found[base]), 1),
                "frozen, MB": round(whole, 1),
                "linear maps of the blocks, MB": round(maps, 1),
                "seconds a run": round(statistics.mean(run["seconds"] for run in runs), 1),
            }
        )
    for row in rows:
        apart = [a - b for a, b in zip(found[row["base"]], found["bfloat16"], strict=True)]
        row["points above bfloat16, paired"] = round(statistics.mean(apart), 2)
        if len(apart) > 1:
            half = stats.t.ppf(0.975, len(apart) - 1) * statistics.stdev(apart) / math.sqrt(len(apart))
            row["half of their 95 % interval"] = round(half, 2)
    by = {row["base"]: row for row in rows}
    goals = [
        common.goal(f"points that {base} loses against bfloat16", -by[base]["points above bfloat16, paired"], most=1.0)
        for base in ("int8", "nf4")
    ]
    maps = "linear maps of the blocks, MB"
    goals.append(
        common.goal("linear maps in nf4, of their size in bfloat16", by["nf4"][maps] / by["bfloat16"][maps], most=0.3)
    )
    common.emit(
        "Quantised bases", [{"title": f"{len(seeds)} seeds, {rounds} rounds, {intents} intents", "rows": rows}], goals
    )


if __name__ == "__main__":
    main()
