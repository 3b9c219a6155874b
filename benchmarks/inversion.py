"""FedPFT's reconstruction attack (its Figure 7) from raw features, mixtures and mixtures with noise, on real images.

    python benchmarks/inversion.py
    python benchmarks/inversion.py --only digits "nano-vit, epsilon 10"

Five clients with a Dirichlet partition (alpha = 1) send mixtures of the features of their images. Then
``fedfm audit --attack inversion`` trains inverters on half of the test images, and computes the clients' images. The
intervals are those of the findings. The last line of the output has all numbers as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

import fedfm

ROWS = {"train": 1000, "test": 600}
MIXTURES: dict[str, dict[str, Any]] = {
    "diagonal, at most 10 components": {"method": {"covariance": "diag", "components": 10}},
    "epsilon 10": {"method": {}, "privacy": {"target_epsilon": 10.0, "delta": 1e-4, "unit": "record"}},
    "epsilon 1": {"method": {}, "privacy": {"target_epsilon": 1.0, "delta": 1e-4, "unit": "record"}},
}
DATA = {
    "digits, nano-vit": ("digits", "nano-vit"),
    "CIFAR-10, nano-vit": ("cifar10", "nano-vit"),
    "CIFAR-10, ViT-Ti/16": ("cifar10", str(common.SHARED / "weights" / "vit_tiny_patch16_224")),
}
SOURCES = {
    "raw features": "inversion_features",
    "means": "inversion_components",
    "draws": "inversion_samples",
}
HEAD = "| images | message | from | SSIM with the true image | best own image | verdict | all | trusted 1 % | best 1 % "
HEAD += "| best 1 % of own images | rows found, % |"


def rows_file(folder: Path) -> Path:
    """A file with some images of CIFAR-10, drawn at random."""
    sys.path.insert(0, str(common.SHARED))
    import load  # type: ignore[import-not-found]

    source, rng = load.images("cifar10"), np.random.default_rng(0)
    chosen = [rng.permutation(np.flatnonzero(source["split"] == part))[:count] for part, count in ROWS.items()]
    index = np.concatenate(chosen)
    path = folder / "cifar10.npz"
    np.savez(path, **{key: source[key][index] for key in ("x", "y", "split")}, classes=np.array(source["classes"]))
    return path


def experiment(data: dict[str, Any], model: str, mixture: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "data": data | {"partition": {"name": "dirichlet", "alpha": 1.0, "clients": 5}},
        "model": {"name": model},
        "method": {"name": "fedpft", **mixture["method"]},
        "run": {"seed": 1, "workers": 1},
    }
    return found | ({"privacy": mixture["privacy"]} if "privacy" in mixture else {})


def format_interval(value: Any, low: Any, high: Any) -> str:
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def main() -> None:
    options = common.arguments(__doc__, only={"nargs": "+", "default": [""], "help": "cases with one of these texts"})
    folder, found = common.scratch(), dict[str, Any]()
    print(HEAD + "\n|" + 11 * "---|", flush=True)
    for label, (source, model) in DATA.items():
        if not common.SHARED.exists() and source != "digits":
            print(f"skipped: no {common.SHARED}", file=sys.stderr)
            continue
        data = {"name": source} if source == "digits" else {"path": str(rows_file(folder))}
        for message, mixture in list(MIXTURES.items())[: 1 if options.quick else None]:
            if not any(text in f"{label}, {message}" for text in options.only):
                continue
            began, place = time.perf_counter(), folder / f"{len(found)}"
            result = fedfm.run(experiment(data, model, mixture), place, progress=fedfm.Progress())
            findings = {f.name: f for f in fedfm.audit(place, ["inversion"])}
            rate = findings["inversion_rows"]
            for name, key in SOURCES.items():
                f = findings[key]
                tops = [f.detail[of]["ssim"] for of in ("all", "attacker", "oracle", "baseline_oracle")]
                rows = f"{100 * rate.estimate:.1f} [{100 * rate.low:.1f}, {100 * rate.high:.1f}], {rate.verdict}"
                print(
                    f"| {label} | {message} | {name} | {format_interval(f.estimate, f.low, f.high)} | {f.bound:.3f} "
                    f"| {f.verdict if name != 'raw features' else ''} | {' | '.join(f'{x:.3f}' for x in tops)} "
                    f"| {rows if name == 'draws' else ''} |",
                    flush=True,
                )
            seconds = round(time.perf_counter() - began)
            found[f"{label}, {message}"] = {name: f.to_dict() for name, f in findings.items()} | {
                "accuracy": result["accuracy"],
                "seconds": seconds,
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
