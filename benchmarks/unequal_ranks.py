"""LoRA of unequal ranks: loss, bytes and energy above the smallest rank, for the methods that take such ranks.

    python benchmarks/unequal_ranks.py
    python benchmarks/unequal_ranks.py --rest

Six clients have 1,000 questions of banking77 as running text, in equal parts. Five clients train LoRA of rank 1, one of
rank 16, on the attention of a Llama of 260,032 parameters that was pretrained on stories. All methods train alike. Each
has three seeds, which draw the rows, their parts and the order of batches. The energy of a model is the squared
Frobenius norm of its Delta W over all modules; the table has the share of it in the singular values after the first of
each module, which is what only the client of rank 16 can hold. The last line of the output has all numbers as JSON.

``--rest`` trains raFLoRA for one seed, and then only aggregates: its clients send back what they receive. So it shows
what the aggregation of FlexLoRA alone does to the energy, and that raFLoRA's leaves it as it is.
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common
import torch

import fedfm
from fedfm import seeds
from fedfm.api import predict
from fedfm.linalg.params import Params
from fedfm.methods._lora_products import Term, delta_w
from fedfm.methods.flexlora import ENERGY, cut, truncation_error
from fedfm.methods.raflora import partition_mean
from fedfm.models.adapters import lora

RANKS = (1, 1, 1, 1, 1, 16)
ALPHA = 32.0
METHODS = {"flora": RANKS, "flexlora": RANKS, "fedex_lora": RANKS, "raflora": RANKS, "flexlora, all of rank 1": (1,)}
ROWS, TEST_ROWS = 1000, 400


def rows_file(folder: Path, seed: int) -> Path:
    """A file with some rows of banking77, drawn by the seed."""
    with gzip.open(common.SHARED / "text" / "banking77.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    path, drawn = folder / f"banking77-{seed}.jsonl", []
    for split, count in (("train", ROWS), ("test", TEST_ROWS)):
        own = [row for row in rows if row["split"] == split]
        chosen = seeds.generator(seed, "benchmark", split).permutation(len(own))[:count]
        drawn += [{"text": own[i]["text"], "split": split} for i in chosen]
    path.write_text("".join(json.dumps(row) + "\n" for row in drawn))
    return path


def experiment(rows: Path, name: str, ranks: tuple[int, ...], seed: int, rounds: int) -> dict[str, Any]:
    return {
        "data": {"path": str(rows), "partition": {"name": "iid", "clients": len(RANKS)}},
        "model": {
            "name": str(common.SHARED / "weights" / "stories260K-llama"),
            "task": "language_modelling",
            "max_length": 64,
            "adaptation": {"name": "lora", "rank": max(RANKS), "alpha": ALPHA},
        },
        "method": {
            "name": name,
            "rounds": rounds,
            "ranks": list(ranks),
            "local": {"name": "adamw", "learning_rate": 0.003, "batch_size": 16},
        },
        "run": {"seed": seed, "workers": 1},
    }


def energy_above(w: Params, rank: int) -> float:
    """The share of ||Delta W||_F^2, over all modules, in the singular values after the first ``rank``."""
    sigma = [torch.linalg.svdvals(u @ v) for u, v in lora.factors(w, ALPHA).values()]
    return truncation_error(sigma, rank) / truncation_error(sigma, 0)


def measure(folder: Path, rounds: int, several: range) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for seed in several:
        rows = rows_file(folder, seed)
        for label, ranks in METHODS.items():
            out = folder / f"{label}-{seed}".replace(" ", "-").replace(",", "")
            result = fedfm.run(experiment(rows, label.partition(",")[0], ranks, seed, rounds), out)
            figures = {"loss": result["loss"], "above": energy_above(predict.load(out)[2], min(RANKS))}
            figures |= {"bytes_up": result["bytes_up"], "bytes_down": result["bytes_down"]}
            by_round = [line[ENERGY] for line in fedfm.load_run(out).metrics() if ENERGY in line]
            if by_round:
                figures |= {"above_by_round": by_round}
            found.setdefault(label, {})[str(seed)] = figures
    return found


def table(found: Mapping[str, Mapping[str, Any]]) -> None:
    print("| method | test loss, mean (least to most) | energy above rank 1: first round, last | MB up | MB down |")
    print("|---|---|---|---|---|")
    for label, by_seed in found.items():
        of = {key: [f[key] for f in by_seed.values()] for key in ("loss", "above", "bytes_up", "bytes_down")}
        first = [f["above_by_round"][0] for f in by_seed.values() if "above_by_round" in f]
        start = f"{statistics.mean(first):.4f}" if first else ""
        loss = f"{statistics.mean(of['loss']):.3f} ({min(of['loss']):.3f} to {max(of['loss']):.3f})"
        up, down = (statistics.mean(of[key]) / 1e6 for key in ("bytes_up", "bytes_down"))
        print(f"| `{label}` | {loss} | {start}, {statistics.mean(of['above']):.4f} | {up:.2f} | {down:.2f} |")


def at_rest(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Energy above rank 1 after 0, 1, ... aggregations of clients that send back what they receive."""
    fedfm.run(experiment(rows_file(folder, 0), "raflora", RANKS, 0, rounds), folder / "rest")
    start = predict.load(folder / "rest")[2]
    shares = {"flexlora": [energy_above(start, 1)], "raflora": [energy_above(start, 1)]}
    for name, told in shares.items():
        w = start
        for _ in range(3):
            found = [Term(1 / len(RANKS), lora.first(w, r)) for r in RANKS]
            raflora = name == "raflora"
            dW = partition_mean(found, sorted({*RANKS}), w, ALPHA) if raflora else delta_w(found, ALPHA)
            w = w.replace(cut(dW, w, ALPHA)[0])
            told.append(energy_above(w, 1))
    return shares


def main() -> None:
    options = common.arguments(__doc__, rest={"action": "store_true", "help": "aggregate without training"})
    if not common.SHARED.exists():
        raise SystemExit(f"skipped: no {common.SHARED}")
    folder, rounds = common.scratch(), 2 if options.quick else 8
    if options.rest:
        found: Any = at_rest(folder, rounds)
        for name, shares in found.items():
            print(f"{name}: " + ", ".join(f"{share:.2g}" for share in shares))
    else:
        found = measure(folder, rounds, range(1 if options.quick else 3))
        table(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
