r"""Linear probes of a student and of its teacher, and the student's violations, on rows of several sets.

    python reproduce/blindfed/probe_twin.py .data/vit_tiny_fhe .data/vit_tiny_patch16_224 \
        .data/tiny_imagenet50.npz .data/cifar10.npz .data/pacs.npz

A probe is scikit-learn's StandardScaler and LogisticRegression(C = 0.05) on the inputs of the head, fitted to train
rows and scored on test rows; a row whose features are not numbers, since an argument left its interval too far, is left
out of the fit and counts as wrong. ``--rows`` and ``--tests`` take as many rows of each set, evenly spaced. Both models
get the same rows, and the last column is the mean of the paired differences with its 95 % interval, by the normal
approximation. The rows go to docs/results/blindfed-vit-tiny.md, into the table at the mark ``--table``, which keeps
those of other sets, unless there is ``--no-page``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from page import merge, table
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.encrypted.student import conversion
from fedfm.models import derived_modules
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

AT_ONCE = 256  # rows that are prepared at once


def probe_results(name: str, data: Table, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, float, int, int]:
    """Which test rows the probe has right; the part of the rows without numbers; arguments outside, and all."""
    model = load_model(
        ModelSpec(name, adaptation=AdaptationSpec("head"), device="cpu"), classes=data.classes, kind="image"
    )
    conversion.forget(model.module)
    parts = np.split(np.concatenate([train, test]), range(AT_ONCE, len(train) + len(test), AT_ONCE))
    x = np.concatenate([model.features(model.prepare(data, part)).numpy() for part in parts])
    labels = np.asarray(data.labels)
    finite = np.isfinite(x).all(1)
    fitted = make_pipeline(StandardScaler(), LogisticRegression(C=0.05, max_iter=2000))
    learned = finite[: len(train)]
    fitted.fit(x[: len(train)][learned], labels[train][learned])
    counts = derived_modules.violations(model.module).values()
    said = fitted.predict(np.where(finite[:, None], x, 0)[len(train) :])
    right = finite[len(train) :] & (said == labels[test])
    return right, 1 - float(finite.mean()), sum(n for n, _ in counts), sum(n for _, n in counts)


def main() -> None:
    """One row a set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("twin"), parser.add_argument("teacher"), parser.add_argument("sets", nargs="+")
    parser.add_argument("--rows", type=int), parser.add_argument("--tests", type=int, help="so many test rows")
    parser.add_argument("--no-page", action="store_true")
    parser.add_argument("--table", default="probes", help="the mark of the table in the page")
    a = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for path in a.sets:
        where = DataSpec(path=path) if Path(path).suffix else DataSpec(name=path)
        data = load_table(where, seed=0, task="classification")
        train, test = data.rows("train"), data.rows("test")
        if a.rows and a.rows < len(train):
            train = train[np.linspace(0, len(train) - 1, a.rows).astype(int)]
        if a.tests and a.tests < len(test):
            test = test[np.linspace(0, len(test) - 1, a.tests).astype(int)]
        line: dict[str, Any] = {
            "set": Path(path).name.removesuffix(".npz"),
            "train rows": len(train),
            "test rows": len(test),
        }
        teacher, *_ = probe_results(a.teacher, data, train, test)
        twin, lost, outside, total = probe_results(a.twin, data, train, test)
        line |= {
            "teacher, %": 100 * teacher.mean(),
            "student, %": 100 * twin.mean(),
            "rows without numbers, %": 100 * lost,
        }
        line |= {"outside, of a million": 1e6 * outside / total}
        below = 100 * (teacher.astype(float) - twin)
        line |= {"points below": f"{below.mean():.1f} ± {1.96 * below.std() / np.sqrt(len(below)):.1f}"}
        lines.append(line)
        print(line, flush=True)
    print(table(lines))
    if not a.no_page:
        merge(a.table, table(lines))


if __name__ == "__main__":
    main()
