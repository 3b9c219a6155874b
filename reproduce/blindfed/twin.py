"""How far nano-vit-fhe is from nano-vit on pictures that neither has seen: a part of docs/results/blindfed-twin.md.

    OMP_NUM_THREADS=1 python reproduce/blindfed/twin.py      # minutes on one core
    python reproduce/blindfed/twin.py --only digits --twin path/to/a/folder    # prints, writes nothing

Linear probes of both on the same folds: standardised features and a logistic regression, C chosen on a fifth of each
fold's training rows. Every picture of a set is scored once a repetition, by a probe that was not fitted to it; a
difference is paired, picture by picture, so that its standard error is that of a mean of differences. Held out are
pictures that were used neither for nano-vit nor for its student.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.preprocessing import StandardScaler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sets import MADE, Sets

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.linalg.threads import torch_threads
from fedfm.models import derived_modules
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "results" / "blindfed-twin.md"
GRID = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # values of C, the inverse regularisation
FOLDS = 5
TRAINED = {"cifar10": 9_402, "fashion_mnist": 10_000}  # numbers of training images of nano-vit
KEPT_OUT = 500  # images of each set that training and distillation kept for validation
TITLES = {
    "cifar10": "CIFAR-10",
    "fashion_mnist": "Fashion-MNIST",
    "digits": "digits",
    "tiny_imagenet50": "Tiny-ImageNet, 50 classes",
    "pacs": "PACS",
    "brain_mri": "brain MRI",
}
WHO = {
    "trained": "nano-vit and the student were trained on them",
    "held_out": "held out",
    "jpeg": "held out, of the official test set, JPEG",
    "unseen": "held out, as is the whole set",
}


def pictures(name: str, source: Path) -> list[tuple[Table, np.ndarray]]:
    """The tables of a set, with the kind of each row, a key of ``WHO``."""
    if name == "digits":
        table = load_table(DataSpec(name="digits"), seed=0, task="classification")
        return [(table, np.full(len(table), "unseen"))]
    found = []
    for part in (name, "cifar10_official_test_jpeg") if name == "cifar10" else (name,):
        file = f"{part}.npz" if part == name else f"{part}.unsplit.npz"  # all are test rows, and a table needs others
        Sets(source, HERE).make(file)
        path = MADE / file
        table = load_table(DataSpec(path=str(path)), seed=0, task="classification")
        who = np.full(len(table), "jpeg" if part != name else "unseen", dtype="<U8")
        if part in TRAINED:
            rng = np.random.default_rng(0)  # as reproduce/weights/nano_vit/train.py draws, for one set after the other
            orders = {trained: rng.permutation(n) for trained, n in TRAINED.items()}
            who[:] = "held_out"
            who[np.flatnonzero(np.array(table.split) != "test")[orders[part][KEPT_OUT:]]] = "trained"
        found.append((table, who))
    return found


@dataclass(frozen=True)
class Features:
    """What enters a head (n, d), labels (n,), and how many arguments were outside their intervals, of how many."""

    x: np.ndarray
    y: np.ndarray
    outside: tuple[int, int]


def features(table: Table, model: str) -> Features:
    """The features of all rows by a frozen model."""
    spec = ModelSpec(model, adaptation=AdaptationSpec("head"))
    loaded = load_model(spec, classes=table.classes, kind=table.kind, seed=0)
    encoded = loaded.encode(loaded.prepare(table, range(len(table))))
    counts = list(derived_modules.violations(loaded.module).values())
    x = encoded.tensors["features"].double().numpy()
    return Features(x, encoded.labels.numpy(), (sum(c[0] for c in counts), sum(c[1] for c in counts)))


def probe(x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray, seed: int) -> tuple[np.ndarray, float]:
    """Which test rows a probe gets right, and its C; features without a number count as zeros."""
    x = np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
    fitted, judged = train_test_split(train, test_size=0.2, stratify=y[train], random_state=seed)

    def right(rows: np.ndarray, others: np.ndarray, c: float) -> np.ndarray:
        scaler = StandardScaler().fit(x[rows])
        head = LogisticRegression(C=c, max_iter=300, tol=1e-3).fit(scaler.transform(x[rows]), y[rows])
        return np.asarray(head.predict(scaler.transform(x[others])) == y[others])

    best = max(GRID, key=lambda c: right(fitted, judged, c).mean())
    return right(train, test, best), best


def measure(name: str, twin: str, source: Path, repeats: int) -> dict[str, Any]:
    """Accuracies of both, their difference and its standard error, for each kind of row of a set."""
    parts = pictures(name, source)
    who = np.concatenate([w for _, w in parts])
    made = {model: [features(table, model) for table, _ in parts] for model in ("nano-vit", twin)}
    xs = {model: np.concatenate([m.x for m in several]) for model, several in made.items()}
    y = np.concatenate([m.y for m in made[twin]])
    outside = [sum(m.outside[i] for m in made[twin]) for i in (0, 1)]
    rights = {model: np.zeros(len(y)) for model in xs}
    chosen: dict[str, list[float]] = {model: [] for model in xs}
    for seed in range(repeats):
        for train, test in StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(y, y):
            for model, x in xs.items():
                right, c = probe(x, y, train, test, seed)
                rights[model][test] += right / repeats
                chosen[model].append(c)
    found: dict[str, Any] = {"outside": outside, "c": {"teacher": chosen["nano-vit"], "twin": chosen[twin]}}
    found["no_number"] = int((~np.isfinite(xs[twin]).all(1)).sum())
    for kind in [k for k in WHO if (who == k).any()]:
        rows = who == kind
        teacher, student = rights["nano-vit"][rows], rights[twin][rows]
        difference = student - teacher
        found[kind] = {
            "rows": int(rows.sum()),
            "teacher": round(100 * float(teacher.mean()), 3),
            "twin": round(100 * float(student.mean()), 3),
            "difference": round(100 * float(difference.mean()), 3),
            "error": round(100 * float(difference.std(ddof=1) / len(difference) ** 0.5), 3),
        }
    return found


def page(found: dict[str, Any]) -> str:
    """The tables."""
    out = [
        "| pictures | which | number | nano-vit, % | nano-vit-fhe, % | difference, points | standard error |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, parts in found.items():
        for kind in [k for k in WHO if k in parts]:
            p = parts[kind]
            cells = (f"{p['rows']:,}", f"{p['teacher']:.2f}", f"{p['twin']:.2f}", f"{p['difference']:+.2f}")
            out.append(f"| {TITLES[name]} | {WHO[kind]} | {' | '.join(cells)} | {p['error']:.2f} |")
    held = [p for parts in found.values() for kind, p in parts.items() if kind in WHO and kind != "trained"]
    number = sum(p["rows"] for p in held)
    means = [sum(p["rows"] * p[key] for p in held) / number for key in ("teacher", "twin", "difference")]
    error = math.hypot(*(p["rows"] * p["error"] for p in held)) / number
    cells = (f"{number:,}", f"{means[0]:.2f}", f"{means[1]:.2f}", f"{means[2]:+.2f}", f"{error:.2f}")
    out.append(f"| all sets | all held out | {' | '.join(cells)} |")
    out += ["", "| pictures | arguments outside their intervals | of | pictures without numbers |", "|---|---|---|---|"]
    for name, parts in found.items():
        outside, total = parts["outside"]
        out.append(f"| {TITLES[name]} | {outside:,} | {total / 1e6:,.0f} million | {parts['no_number']} |")
    return "\n".join(out)


def put(name: str, text: str) -> None:
    """Write a part of the page, between ``<!-- name -->`` and ``<!-- end name -->``."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end {name} -->"
    before, found, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    if not found or end not in rest:
        raise SystemExit(f"{PAGE}: expected {begin.strip()} and {end.strip()}")
    PAGE.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")


def main() -> None:
    """Measure, print, and write the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of raw sets")
    parser.add_argument("--only", nargs="+", choices=TITLES, help="these sets; the others keep their figures")
    parser.add_argument("--twin", default="nano-vit-fhe", help="another student: the page stays as it is")
    parser.add_argument("--repeats", type=int, default=2, help="of the division into folds")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="sklearn")
    store = PAGE.with_suffix(".json")
    ours = options.twin == "nano-vit-fhe"
    found = json.loads(store.read_text()) if store.exists() and ours else {}
    with torch_threads(1):
        for name in options.only or TITLES:
            found[name] = measure(name, options.twin, options.data, options.repeats)
            print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    found = {name: found[name] for name in TITLES if name in found}
    print(page(found))
    if ours:
        store.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        put("twin", page(found))


if __name__ == "__main__":
    main()
