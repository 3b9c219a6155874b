r"""What each choice of released states is worth, and what it gives away: a part of docs/results/blindfed-twin.md.

    OMP_NUM_THREADS=1 python reproduce/blindfed/released.py    # ten minutes on one core

blindfed in the clear on Fashion-MNIST, two clients, Dirichlet 1, ten rounds of five epochs, 1,000 training rows; then
the audit ``substitute_model`` of the run, in which the larger client trains a copy of the model on its released states.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from twin import HERE, MADE, PAGE, ROOT, Sets, put

import fedfm

STORE = PAGE.with_name("blindfed-released.json")
KINDS = {
    "class": "`class`: the mean over the tokens",
    "grid": "`grid`: and the means of four quadrants",
    "tokens": "`tokens`: every token times a secret matrix",
}
SEED = 0


def tables(released: str) -> dict[str, Any]:
    """The experiment."""
    return {
        "data": {
            "path": str(MADE / "fashion_mnist.npz"),
            "limit": 1000,
            "partition": {"name": "dirichlet", "alpha": 1.0, "clients": 2},
        },
        "method": {
            "name": "blindfed",
            "foundation": "nano-vit-fhe",
            "encryption": "clear",
            "released": released,
            "rounds": 10,
            "local": {"name": "sgd", "learning_rate": 0.05, "momentum": 0.9, "epochs": 5, "batch_size": 16},
        },
        "run": {"seed": SEED, "evaluate_every": 0},
    }


def measure(released: str, out: Path) -> dict[str, Any]:
    """Accuracy of the adapters, and the student's likeness to the model."""
    result = fedfm.run(tables(released), out)
    found = {f.name: f for f in fedfm.audit(out, "substitute_model")}["substitute.student"]
    return {"accuracy": round(100 * result["accuracy"], 2), **found.detail}


def section(found: dict[str, dict[str, Any]]) -> str:
    """The table."""
    quarter, whole = "cosine_from_0.25_of_the_rows", "cosine"
    head = ["released", "accuracy, %", f"cosine, {found['class']['rows']} rows", "a quarter of them", "on photographs"]
    out = [f"| {' | '.join(head)} | same class | on photographs |", "|" + "---|" * (len(head) + 2)]
    for kind, words in KINDS.items():
        line = found[kind]
        cosines = [f"{line[key]:.2f}" for key in (whole, quarter, "cosine_outside")]
        agree = [f"{line[key]:.0%}" for key in ("agreement", "agreement_outside")]
        out.append(f"| {' | '.join([words, format(line['accuracy'], '.1f'), *cosines, *agree])} |")
    return "\n".join(out)


def main() -> None:
    """Measure, print, and write the page's section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of raw sets")
    options = parser.parse_args()
    Sets(options.data, HERE).make("fashion_mnist.npz")
    with tempfile.TemporaryDirectory() as folder:
        found = {kind: measure(kind, Path(folder) / kind) for kind in KINDS}
    print(section(found))
    STORE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    put("released", section(found))


if __name__ == "__main__":
    main()
