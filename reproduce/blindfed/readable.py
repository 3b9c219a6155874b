"""What a linear head can read from released states: a part of docs/results/blindfed-twin.md.

    OMP_NUM_THREADS=1 python reproduce/blindfed/readable.py    # two minutes on one core

Side adapters can only add to a linear head on the last state what the other states hold. So the same probe as in
twin.py, C chosen on a fifth of the training rows, is fitted to the rows of the tables in blindfed.md: to the last state
alone, and to more of what the server releases.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
from twin import HERE, MADE, PAGE, ROOT, Sets, probe, put

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.linalg.threads import torch_threads
from fedfm.models.adapters.side_adapter import SideModel
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

STORE = PAGE.with_name("blindfed-readable.json")
SETS = {"digits": ("digits", 800), "fashion_mnist": ("Fashion-MNIST", 800), "cifar10": ("CIFAR-10", 1500)}
SEEDS = (0,)
READ = {
    "last": "last block, mean",
    "last_grid": "last block, mean and quadrants",
    "means": "all blocks, mean",
    "grid": "all blocks, mean and quadrants",
}


def measure(name: str, limit: int, seed: int) -> dict[str, float]:
    """Accuracy in percent on all test rows, of each choice of states."""
    at = {"name": name} if name == "digits" else {"path": str(MADE / f"{name}.npz")}
    table = load_table(DataSpec(**at, limit=limit), seed=seed, task="classification")
    spec = ModelSpec("nano-vit-fhe", adaptation=AdaptationSpec("side_adapter", released="grid"))
    model = load_model(spec, classes=table.classes, kind="image", seed=0)
    assert isinstance(model, SideModel)
    parts = [model.prepare(table, table.rows(split)) for split in ("train", "test")]
    states = np.concatenate([model.states(rows).double().numpy() for rows in parts])  # (n, L, P, d)
    y = np.concatenate([rows.labels.numpy() for rows in parts])
    train, test = np.arange(len(parts[0])), np.arange(len(parts[0]), len(y))
    read = {"last": states[:, -1, :1], "last_grid": states[:, -1], "means": states[:, :, 0], "grid": states}
    return {
        k: round(100 * float(probe(x.reshape(len(x), -1), y, train, test, 0)[0].mean()), 2) for k, x in read.items()
    }


def section(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """The table, means over the seeds."""
    out = [f"| accuracy, % | {' | '.join(READ.values())} |", f"|---|{'---|' * len(READ)}"]
    for name, (title, limit) in SETS.items():
        cells = [f"{np.mean([s[k] for s in found[name].values()]):.1f}" for k in READ]
        out.append(f"| {title}, {limit:,} training rows | {' | '.join(cells)} |")
    return "\n".join(out)


def main() -> None:
    """Measure, print, and write the page's section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of raw sets")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="sklearn")
    found: dict[str, dict[str, dict[str, float]]] = {}
    with torch_threads(1):
        for name, (_, limit) in SETS.items():
            if name != "digits":
                Sets(options.data, HERE).make(f"{name}.npz")
            found[name] = {str(seed): measure(name, limit, seed) for seed in SEEDS}
    print(section(found))
    STORE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    put("readable", section(found))


if __name__ == "__main__":
    main()
