"""What is left of FedBaF's leak under each hardened variant, and its cost: docs/results/fedbaf-secrecy.md.

    python reproduce/fedbaf/extraction.py            # a quarter of an hour on two cores
    python reproduce/fedbaf/extraction.py --only "as printed" "the same on SCAFFOLD"    # the others keep their figures
    python reproduce/fedbaf/extraction.py --quick    # one seed, two variants, no file

Digits as 64 features; an MLP 64-96-64-10 of 13 k parameters; the secret model is the same MLP, trained on shifted
pictures of other digits. 20 clients, C = 0.3, 12 rounds. The attackers see every model that the server sends, and know
the variant and psi. Errors are relative, |x - w_pre| / |w_pre|; the accuracy of what they compute is that of the
computed model on the secret model's own task, on rows it was not trained on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import nn

from fedfm.audits.extraction import recover
from fedfm.audits.fedbaf_coalition import Rounds
from fedfm.audits.inference.extraction import NoIntersectionError, relative_error
from fedfm.audits.replay import RecordedRun
from fedfm.data.load import load_table
from fedfm.data.partition import deal
from fedfm.data.spec import DataSpec, PartitionSpec
from fedfm.linalg.threads import torch_threads
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedbaf.fedbaf import FedBaF
from fedfm.methods.scaffold import Scaffold
from fedfm.methods.weight_init import WeightInit
from fedfm.models.wrap import wrap
from fedfm.runtime import predictions
from fedfm.runtime.partitioned import Partitioned
from fedfm.training import SGD

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "fedbaf-secrecy.md"
SEEDS, ROUNDS, CLIENTS, FRACTION = (1, 2), 12, 20, 0.3
LOCAL = SGD(learning_rate=0.15, epochs=5, batch_size=10)
PARTITIONS = {"IID": {"name": "iid"}, "two classes a client": {"name": "by_class", "classes_per_client": 2}}
VARIANTS: dict[str, dict[str, Any]] = {
    "as printed": {},
    "the same on SCAFFOLD": {"base": Scaffold()},
    "psi = 0.1": {"psi": 0.1},
    "alpha per tensor": {"harden": "per_tensor"},
    "alpha per coordinate": {"harden": "per_coordinate"},
    "alpha per coordinate, log-uniform": {"harden": "log_uniform"},
    "half of the tensors a round": {"harden": "half"},
    "first round only": {"harden": "first_round"},
    "noise drawn once, 0.3": {"harden": "noise_once", "noise": 0.3},
    "noise drawn once, 1": {"harden": "noise_once", "noise": 1.0},
    "fresh noise, 1": {"harden": "noise_afresh", "noise": 1.0},
}


def network(seed: int) -> nn.Module:
    """An MLP 64-96-64-10."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10))


def loss(module: nn.Module, batch: Any) -> torch.Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(module(batch["features"]), batch["labels"])


def shift_images(pictures: np.ndarray) -> np.ndarray:
    """Every picture one pixel to the left, right, up and down."""
    moved = [np.roll(pictures, by, axis) for axis in (1, 2) for by in (-1, 1)]
    return np.concatenate(moved).reshape(-1, 64)


def rows(folder: Path) -> dict[str, np.ndarray]:
    """The federation's rows as an npz; the secret model's own rows."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    secret, tested, own = order[:600], order[600:700], order[700:]
    x = (digits.images / 16).astype(np.float32)
    split = np.where(np.arange(len(own)) < 300, "test", "train")
    np.savez(
        folder / "rows.npz",
        x=x[own].reshape(-1, 64),
        y=digits.target[own],
        split=split,
        classes=np.array([str(i) for i in range(10)]),
    )
    return {
        "x": shift_images(x[secret]),
        "y": np.tile(digits.target[secret], 4),
        "test_x": shift_images(x[tested]),
        "test_y": np.tile(digits.target[tested], 4),
    }


def pretrain(folder: Path, data: dict[str, np.ndarray], seed: int) -> Path:
    """The secret model, as a folder that FedBaF reads."""
    module = network(1000 + seed)
    x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    optimiser, rng = torch.optim.Adam(module.parameters(), 2e-3), np.random.default_rng(seed)
    for _ in range(40):
        for index in np.array_split(rng.permutation(len(x)), len(x) // 32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(module(x[index]), y[index]).backward()
            optimiser.step()
    out = folder / f"secret{seed}"
    out.mkdir()
    save_file(module.state_dict(), out / "model.safetensors")
    (out / "fedfm.json").write_text("{}")
    return out


def own_accuracy(state: dict[str, torch.Tensor], data: dict[str, np.ndarray]) -> float:
    """The accuracy of weights on the secret model's task."""
    module = network(0)
    module.load_state_dict(state)
    with torch.no_grad():
        return float((module(torch.from_numpy(data["test_x"])).argmax(1).numpy() == data["test_y"]).mean())


def population(folder: Path, partition: dict[str, Any], seed: int) -> Partitioned:
    """Who has which rows, and the model."""
    spec = DataSpec(path=str(folder / "rows.npz"), partition=PartitionSpec(clients=CLIENTS, **partition))
    table = load_table(spec, seed=seed)
    return Partitioned(deal(table, spec, seed=seed), wrap(network(seed), loss, classes=table.classes, head="4"))


def measure(folder: Path, method: Any, partition: dict[str, Any], seed: int, data: Any) -> dict[str, float]:
    """One run: its accuracy, and for FedBaF what everybody and single clients compute."""
    people = population(folder, partition, seed)
    keep = None
    if isinstance(method, FedBaF):
        keep = Rounds(method, clients=CLIENTS, rounds=ROUNDS, trainable=13_000, seed=seed)
    with tempfile.TemporaryDirectory() as private:
        for turn in RecordedRun(method, people, Path(private), seed=seed).turns(ROUNDS):
            if keep is not None:
                keep.see(turn, people)
    w = method.params_for(turn.after, "")
    found = {"accuracy": predictions.scores(method, people.model, w, people.test)["accuracy"]}
    if keep is None:
        return found
    target = keep.target

    def score_estimate(members: Any) -> tuple[float, float]:
        lines = keep.lines(members)
        x, _ = recover(lines, method, target.groups, exact=lines.exact)
        return relative_error(x, target.truth), own_accuracy(dict(target.into(w, x)), data)

    alone = []
    for client in people.clients:
        try:
            alone.append(score_estimate({client}))
        except NoIntersectionError:  # never sampled
            continue
    everyone = score_estimate(set(people.clients))
    return found | {
        "all": everyone[0],
        "all_accuracy": everyone[1],
        "one": float(np.median([e for e, _ in alone])),
        "one_accuracy": float(np.median([a for _, a in alone])),
        "final": relative_error(target.of(w), target.truth),
    }


def table(quick: bool, only: list[str] | None) -> dict[str, Any]:
    """All runs, or these."""
    chosen = dict(list(VARIANTS.items())[:2]) if quick else VARIANTS
    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name, torch_threads(1):
        folder = Path(name)
        data = rows(folder)
        for seed in SEEDS[:1] if quick else SEEDS:
            secret = pretrain(folder, data, seed)
            out.setdefault("secret", []).append(own_accuracy(load_file(secret / "model.safetensors"), data))
            common: dict[str, Any] = {"rounds": ROUNDS, "fraction": FRACTION, "local": LOCAL}
            kept = {"foundation": str(secret), "identical": ("labels",)}
            methods: dict[str, Any] = {"no foundation model": FedAvg(**common)}
            methods["weight initialisation"] = WeightInit(**common, **kept)
            methods |= {label: FedBaF(**common, **kept, **keys) for label, keys in chosen.items()}
            for label, method in methods.items():
                if only is not None and label not in only:
                    continue
                for part, partition in PARTITIONS.items():
                    found = measure(folder, dataclasses.replace(method), partition, seed, data)
                    print(seed, label, part, json.dumps(found), flush=True)
                    out.setdefault(label, {}).setdefault(part, []).append(found)
    return out


def mean(found: list[dict[str, float]], key: str) -> float:
    """The mean of a figure over the seeds."""
    return float(np.mean([f[key] for f in found]))


def page(out: dict[str, Any]) -> str:
    """The table."""
    lines = [
        "| | accuracy IID | accuracy non-IID | all clients: error IID / non-IID | accuracy of what they compute | "
        "one client: error IID / non-IID | accuracy of what it computes | final model's own error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, by_part in out.items():
        if label == "secret":
            continue
        a, b = by_part.values()
        cells = [f"{100 * mean(p, 'accuracy'):.1f}" for p in (a, b)]
        if "all" in a[0]:
            for key in ("all", "one"):
                cells.append(" / ".join(f"{mean(p, key):.2g}" for p in (a, b)))
                cells.append(" / ".join(f"{100 * mean(p, f'{key}_accuracy'):.0f}" for p in (a, b)))
            cells.append(" / ".join(f"{mean(p, 'final'):.2g}" for p in (a, b)))
        else:
            cells += [""] * 5
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run, print, and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, two variants, no file")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows of the table; the others keep theirs")
    options = parser.parse_args()
    quick, store = options.quick, PAGE.with_suffix(".json")
    if unknown := set(options.only or ()) - {"no foundation model", "weight initialisation", *VARIANTS}:
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    out = table(quick, options.only)
    if options.only is not None and not quick:
        known = json.loads(store.read_text()) | out
        order = ["secret", "no foundation model", "weight initialisation", *VARIANTS]
        out = {label: known[label] for label in order if label in known}
    text = page(out)
    print(text)
    if not quick:
        store.write_text(json.dumps(out, indent=1) + "\n")
        before, _, rest = PAGE.read_text().partition("<!-- table -->\n")
        _, _, after = rest.partition("<!-- end -->")
        PAGE.write_text(f"{before}<!-- table -->\n{text}\n<!-- end -->{after}")


if __name__ == "__main__":
    main()
