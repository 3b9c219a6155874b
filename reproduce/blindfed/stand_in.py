"""A stand-in for a twin, to time encrypted inference: a twin of the same shape that nothing has distilled.

    python reproduce/blindfed/stand_in.py .data/vit_tiny_short .data/tiny_imagenet50.npz .data/vit_tiny_stand_in

Queries and the first maps of the MLPs are multiplied by ``--factor``. Scores and hidden numbers are then so small that
the polynomials are near the functions, and all blocks stay within the intervals that are measured on 256 train rows.
Its features are worth nothing; operations, bytes and rounding are those of a twin, with fewer steps of the inverses.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from fedfm.core.rows import Batch
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.models import choose_polynomials, fhe_friendly
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training.distil import Distiller, Recipe, save

ROWS, AT_ONCE = 256, 64
SCALED = ("q_proj", "fc1")


def exact(folder: Path, classes: tuple[str, ...]) -> Model:
    """A twin with the exact functions."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "model"
        shutil.copytree(folder, copy)
        config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
        config.pop(fhe_friendly.KEY, None)
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        spec = ModelSpec(str(copy), adaptation=AdaptationSpec("full"), device="cpu")
        return load_model(spec, classes=classes, kind="image")


def share_outside(model: Model, batches: list[Batch]) -> float:
    """Of the arguments, on these rows."""
    fhe_friendly.forget(model.module)
    with model.evaluating():
        found = torch.cat([model.logits(batch) for batch in batches])
    if not found.isfinite().all():
        raise SystemExit("the stand-in gives no numbers: take a smaller --factor")
    counts = fhe_friendly.violations(model.module).values()
    return sum(n for n, _ in counts) / sum(n for _, n in counts)


def main() -> None:
    """Make its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path), parser.add_argument("data"), parser.add_argument("out", type=Path)
    parser.add_argument("--factor", type=float, default=0.1)
    a = parser.parse_args()
    data = load_table(DataSpec(path=a.data), seed=0, task="classification")
    student = exact(a.model, data.classes)
    with torch.no_grad():
        for name, parameter in student.module.named_parameters():
            if any(part in name for part in SCALED):
                parameter.mul_(a.factor)
    index = np.random.default_rng(0).permutation(data.rows("train"))
    parts = np.split(index[: 2 * ROWS], range(AT_ONCE, 2 * ROWS, AT_ONCE))
    batches = [student.prepare(data, part).batch(range(len(part))) for part in parts]
    known, held = batches[: len(batches) // 2], batches[len(batches) // 2 :]
    distiller = Distiller(exact(a.model, data.classes), student, Recipe(), new_head=True)
    distiller.entries = distiller.measure(lambda: known)
    for block, entry in zip(distiller.student.functions, distiller.entries, strict=True):
        choose_polynomials.apply(block, entry)
    outside = share_outside(student, held)
    distiller.finish(lambda: known, outside)
    save(student, a.out, new_head=True)
    print(f"{a.out}: {outside:.4%} of the arguments outside their intervals on {ROWS} other rows")


if __name__ == "__main__":
    main()
