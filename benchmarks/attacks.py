"""Accuracy of every aggregation under every attack: the table of docs/how-to/attacks.md.

python benchmarks/attacks.py [iid | dirichlet | by_class]

Digits behind the frozen nano-vit (its features computed once), 10 clients, a head trained by fedavg for 20 rounds of 2
epochs at rate 0.1. Mean of seeds 1, 2, 3; with the backdoor, accuracy / success. About two minutes on two cores.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import fedfm
from fedfm.config.experiment import Experiment
from fedfm.runtime.population import populate

SEEDS = (1, 2, 3)
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid", "clients": 10},
    "dirichlet": {"name": "dirichlet", "alpha": 1.0, "clients": 10},
    "by_class": {"name": "by_class", "classes_per_client": 2, "clients": 10},
}
RULES: list[dict[str, Any]] = [
    {"name": "mean"},
    {"name": "median"},
    {"name": "trimmed_mean", "trim": 0.3},
    {"name": "krum", "byzantine": 3},
    {"name": "multi_krum", "byzantine": 3},
    {"name": "norm_clipping"},
    {"name": "geometric_median"},
]
ATTACKS: list[dict[str, Any]] = [
    {},
    {"name": "label_shuffle", "fraction": 0.5},
    {"name": "label_shuffle", "fraction": 0.5, "intensity": 5},
    {"name": "sign_flip", "fraction": 0.2},
    {"name": "scaled_update", "fraction": 0.2, "factor": -5.0},
    {"name": "backdoor", "fraction": 0.2, "factor": 5.0},
]


def features(folder: Path) -> Path:
    """Digits as feature vectors (1797, 192), with their labels and their split."""
    tables = {
        "data": {"name": "digits"},
        "model": {"name": "nano-vit", "adaptation": {"name": "head"}},
        "method": {"name": "fedavg"},
    }
    population = populate(Experiment.from_dict(tables))
    table = population.federated.table
    x = population.rows(np.arange(len(table))).tensors["features"].numpy()
    np.savez(folder / "digits.npz", x=x, y=table.labels, split=table.split, classes=np.array(table.classes))
    return folder / "digits.npz"


def cell(data: Path, partition: str, rule: dict[str, Any], attack: dict[str, Any], folder: Path) -> str:
    """Mean accuracy, and success of a backdoor."""
    results = []
    for seed in SEEDS:
        tables: dict[str, Any] = {
            "data": {"path": str(data), "partition": PARTITIONS[partition]},
            "model": {"name": "features"},
            "method": {"name": "fedavg", "rounds": 20, "local": {"learning_rate": 0.1, "epochs": 2}},
            "aggregation": rule,
            "run": {"seed": seed, "workers": 1, "evaluate_every": 0},
        } | ({"attack": attack} if attack else {})
        with tempfile.TemporaryDirectory(dir=folder) as out:
            results.append(fedfm.run(tables, Path(out) / "run"))
    accuracy = statistics.mean(r["accuracy"] for r in results)
    if attack.get("name") != "backdoor":
        return f"{accuracy:.3f}"
    return f"{accuracy:.3f} / {statistics.mean(r['attack_success'] for r in results):.2f}"


def main() -> None:
    partition = sys.argv[1] if len(sys.argv) > 1 else "dirichlet"
    print("| attack |", " | ".join(rule["name"] for rule in RULES), "|")
    print("|---" * (len(RULES) + 1) + "|")
    with tempfile.TemporaryDirectory() as name:
        data = features(Path(name))
        for attack in ATTACKS:
            cells = [cell(data, partition, rule, attack, Path(name)) for rule in RULES]
            said = ", ".join(str(v) if k == "name" else f"{k} {v:g}" for k, v in attack.items()) or "none"
            print(f"| {said} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
