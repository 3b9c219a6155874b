r"""Which polynomials of a twin cost how much: its features with some functions exact, against the teacher's.

    python reproduce/blindfed/which_polynomials.py .data/vit_tiny_fhe_224 .data/vit_tiny_patch16_224 \
        .data/tiny_imagenet50.npz .data/cifar10.npz .data/pacs.npz --tests 12

Each figure is the mean squared difference of the head's inputs over their variance, averaged over the features, of the
rows whose features are numbers; in brackets the number of the other rows. The exact functions keep the twin's weights.
The table goes to docs/results/blindfed-vit-tiny.md, unless there is ``--no-page``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from page import table, write
from torch import Tensor

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.encrypted.student.modules import Functions
from fedfm.linalg.threads import torch_threads
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec

KINDS = ("exp and 1 / x", "1 / sqrt(x)", "GELU")


def loaded(name: str, data: Table) -> Model:
    """A model with a new head for the classes of these rows."""
    spec = ModelSpec(name, adaptation=AdaptationSpec("head"), device="cpu")
    return load_model(spec, classes=data.classes, kind="image")


def make_exact(functions: Functions, kind: str) -> None:
    """Put the exact function in place of one kind of polynomial."""
    if kind == KINDS[0]:
        functions.softmax.exponential = functions.softmax.inverse = None
    elif kind == KINDS[1]:
        for norm in functions.norms:
            norm.inverse = None
    else:
        functions.gelu.quadratic = None


def distance(twin: Tensor, teacher: Tensor) -> str:
    """Of features (n, d)."""
    good = twin.isfinite().all(1)
    found = (twin - teacher)[good].square().mean(0) / teacher.var(0)
    return f"{float(found.mean()):.3f}" + ("" if good.all() else f" ({int((~good).sum())})")


def main() -> None:
    """One row for each set of exact functions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("twin"), parser.add_argument("teacher"), parser.add_argument("sets", nargs="+")
    parser.add_argument("--tests", type=int, default=24, help="so many test rows of each set")
    parser.add_argument("--no-page", action="store_true")
    a = parser.parse_args()
    lines: list[dict[str, Any]] = [{"exact in the twin": kind} for kind in ("nothing", *KINDS, "all")]
    with torch_threads(1):
        for path in a.sets:
            data = load_table(DataSpec(path=path), seed=0, task="classification")
            test = data.rows("test")
            test = test[np.linspace(0, len(test) - 1, min(a.tests, len(test))).astype(int)]
            teacher = loaded(a.teacher, data)
            want = teacher.features(teacher.prepare(data, test))
            for line in lines:
                twin = loaded(a.twin, data)
                kind = line["exact in the twin"]
                for _, block in twin.parts.blocks:
                    for one in KINDS if kind == "all" else (kind,) if kind in KINDS else ():
                        make_exact(Functions.of(block), one)
                line[Path(path).stem] = distance(twin.features(twin.prepare(data, test)), want)
                print(path, line, flush=True)
    print(table(lines))
    if not a.no_page:
        write("which polynomials", table(lines))


if __name__ == "__main__":
    main()
