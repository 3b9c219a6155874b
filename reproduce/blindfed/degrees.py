"""The paper's Tables 5 and 6 in small, exp and 1 / x by degree: a part of docs/results/blindfed-twin.md.

    OMP_NUM_THREADS=1 python reproduce/blindfed/degrees.py               # some minutes on one core
    OMP_NUM_THREADS=1 python reproduce/blindfed/degrees.py --only tamed  # the others keep their figures

nano-vit with a head fitted on Fashion-MNIST is the teacher. Its student gets the paper's polynomials (T_d for exp, the
iteration of Algorithm 1 on row sums over their largest for 1 / x) in place of one function or two, and learns for one
epoch of the first stage: scores and states as the teacher's, Adam, batches of 16. The accuracy is that of the teacher's
head on what the student gives, without any clamp; a picture without numbers counts as wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sets import MADE, Sets
from twin import HERE, PAGE, ROOT, put

from fedfm.core.rows import Rows
from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.distillation_loss import STATES, TAME, Distiller, Recipe, Taps
from fedfm.encrypted.student.fit_polynomials import WIDER, Measured
from fedfm.encrypted.student.polynomials import Exponential, Inverse, Polynomial, Quadratic, X
from fedfm.linalg.params import Params
from fedfm.linalg.threads import torch_threads
from fedfm.models import derived_modules
from fedfm.models.load import load_model
from fedfm.models.model import Model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.training.fit_head import HeadSpec, fit

STORE = PAGE.with_name("blindfed-degrees.json")
ROWS, TESTED, MEASURED, BATCH = 1_000, 1_000, 512, 16
TAMING, RATE = 6, 5e-4  # epochs; learning rate of the one epoch
EXACT = "exact"
TABLES: dict[str, tuple[int | str, ...]] = {
    "exp": (2, 4, 6, 8, 10, 16, EXACT),
    "inverse": (2, 4, 6, 7, 8, 10, 12, 16, EXACT),
}
GIVEN: dict[str, int | str] = {"exp": 6, "inverse": 7}  # the paper's
KINDS = {
    "tamed": "tamed, other functions exact",
    "tamed_all": "tamed, also the paper's others",
    "untamed": "untamed, other functions exact",
}


@dataclass(frozen=True)
class Exact(Polynomial):
    """A function itself, where a polynomial could stand."""

    function: Callable[[Any], Any]
    interval: tuple[float, float]

    @property
    def depth(self) -> int:
        return 0

    def evaluate_folded(self, u: X) -> X:
        return self.function(u)  # type: ignore[no-any-return]


@dataclass
class Bench:
    """Rows, and models of one architecture.

    Attributes:
        teacher: weights of nano-vit with its head.
        tamed: weights after the first of our stages.
    """

    rows: Rows
    tested: Rows
    load: Callable[[Params | None], Model]
    teacher: Params
    tamed: Params


def bench(source: Path) -> Bench:
    """The rows, the teacher and its tamed copy."""
    Sets(source, HERE).make("fashion_mnist.npz")
    spec = DataSpec(path=str(MADE / "fashion_mnist.npz"), limit=ROWS)
    table = load_table(spec, seed=0, task="classification")

    def load(w: Params | None) -> Model:
        model = load_model(
            ModelSpec("nano-vit", adaptation=AdaptationSpec("full")), classes=table.classes, kind="image"
        )
        if w is not None:
            model.load(w)
        return model

    teacher = load(None)
    rows = teacher.prepare(table, table.rows("train"))
    tested = teacher.prepare(table, table.rows("test")[:TESTED])
    with torch.no_grad():
        x = teacher.features(rows).double()
        head: Any = teacher.head
        weight, bias = fit(lambda: iter([(x, rows.labels)]), len(table.classes), x.shape[1], HeadSpec(l2=1e-2))
        head.weight.copy_(weight)
        head.bias.copy_(bias)
    found = Bench(rows, tested, load, teacher.params(), teacher.params())
    student = load(found.teacher)
    distiller = Distiller(teacher, student, Recipe(), new_head=False)
    train(distiller, TAME, rows, epochs=TAMING, rate=1e-3)
    found.tamed = student.params()
    return found


def train(distiller: Distiller, stage: int, rows: Rows, *, epochs: int, rate: float) -> bool:
    """Adam on a stage's loss, the rate falling to zero; whether it was a number in every step."""
    student = distiller.student.model
    live = [p for p in student.live().values() if p.requires_grad]
    rule, rng = torch.optim.Adam(live, rate), np.random.default_rng(0)
    steps, done = epochs * (len(rows) // BATCH), 0
    student.train_mode()
    for _ in range(epochs):
        for index in np.array_split(rng.permutation(len(rows)), len(rows) // BATCH):
            for group in rule.param_groups:
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * done / steps))
            loss = distiller.loss(stage, rows.batch(index))
            if not bool(torch.isfinite(loss)):
                return False
            rule.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(live, 1.0)
            rule.step()
            done += 1
    student.eval_mode()
    return True


def swap(distiller: Distiller, rows: Rows, degrees: dict[str, int | str], *, gelu: bool) -> None:
    """Put in the paper's polynomials, for what the student's functions see of some rows; no interval is refused.

    Args:
        degrees: of ``exp`` (even) and of ``inverse`` (steps); what is missing stays exact.
        gelu: whether GELU becomes the paper's quadratic.
    """
    functions = distiller.student.functions
    degree, steps = degrees.get("exp", EXACT), degrees.get("inverse", EXACT)
    measured = [Measured() for _ in functions]

    def exponential(interval: tuple[float, float]) -> Polynomial:
        return Exact(torch.exp, interval) if degree == EXACT else Exponential(int(degree), 0, interval)

    for block in functions:
        block.softmax.exponential = exponential((-1.0, 1.0))  # type: ignore[assignment]
    with torch.no_grad(), distiller.student.model.evaluating(), distiller.student.recording():
        for start in range(0, MEASURED, 128):
            distiller.student(rows.batch(np.arange(start, start + 128)))
            for one, block in zip(measured, functions, strict=True):
                one.add(block)
    for one, block in zip(measured, functions, strict=True):
        softmax, (lows, highs) = block.softmax, one.extremes["sums"]
        softmax.exponential = exponential(one.around("scores"))  # type: ignore[assignment]
        ends = float((lows / highs).min()) / WIDER**2, 1.0
        softmax.scales.copy_(1 / (highs * WIDER))
        exact = Exact(lambda u: 1 / u, ends)
        softmax.inverse = exact if steps == EXACT else Inverse(int(steps), ends, 1.0)  # type: ignore[assignment]
        if gelu:
            block.gelu.quadratic = Quadratic(interval=one.around("hidden"))
        for module in block:
            module.forget()


@torch.no_grad()
def score(taps: Taps, rows: Rows) -> dict[str, float]:
    """``accuracy`` in percent, ``no_number`` of pictures, ``outside`` of arguments in percent."""
    conversion.forget(taps.model.module)
    with taps.model.evaluating():
        logits = torch.cat([taps(rows.batch(np.arange(i, min(i + 250, len(rows))))) for i in range(0, len(rows), 250)])
    numbers: Tensor = torch.isfinite(logits).all(1)
    right = (logits.argmax(1) == rows.labels) & numbers
    counts = derived_modules.violations(taps.model.module).values()
    outside, total = (sum(c) for c in zip(*counts, strict=True))
    return {
        "accuracy": round(100 * float(right.double().mean()), 2),
        "no_number": int((~numbers).sum()),
        "outside": round(100 * outside / max(total, 1), 4),
    }


def one(bench: Bench, kind: str, what: str, degree: int | str) -> dict[str, Any]:
    """A student at the swap, and after its epoch."""
    base = bench.teacher if kind == "untamed" else bench.tamed
    distiller = Distiller(bench.load(bench.teacher), bench.load(base), Recipe(polynomials="paper"), new_head=False)
    others = GIVEN if kind == "tamed_all" else {}
    swap(distiller, bench.rows, {**others, what: degree}, gelu=kind == "tamed_all")
    distiller.tamed = Taps(bench.load(base))
    found: dict[str, Any] = {"swapped": score(distiller.student, bench.tested)}
    trained = train(distiller, STATES, bench.rows, epochs=1, rate=RATE)
    found["epoch"] = score(distiller.student, bench.tested) if trained else None
    return found


def cell(found: dict[str, Any] | None) -> str:
    """An accuracy, and how many pictures gave no numbers."""
    if found is None:
        return "NaN in training"
    if found["no_number"] == TESTED:
        return "NaN"
    return f"{found['accuracy']:.1f}" + (f" ({found['no_number']:,} NaN)" if found["no_number"] else "")


def section(found: dict[str, Any]) -> str:
    """The two tables."""
    base = found["base"]
    out = [f"The teacher has {base['teacher']:.1f} %, its tamed copy {base['tamed']:.1f} %.", ""]
    for what, title in (("exp", "Table 5 in small: degree of exp"), ("inverse", "Table 6 in small: steps of 1 / x")):
        kinds = [k for k in KINDS if k in found]
        out += [
            f"### {title}",
            "",
            f"| {what} | {' | '.join(f'{KINDS[k]}: swapped | after an epoch' for k in kinds)} |",
        ]
        out += [f"|---|{'---|' * 2 * len(kinds)}"]
        for degree in map(str, TABLES[what]):
            cells = [cell(found[k][what][degree][when]) for k in kinds for when in ("swapped", "epoch")]
            out.append(f"| {degree} | {' | '.join(cells)} |")
        out.append("")
    return "\n".join(out[:-1])


def main() -> None:
    """Measure, print, and write the page's section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data", help="folder of raw sets")
    parser.add_argument("--only", nargs="+", choices=KINDS, help="these columns; the others keep their figures")
    options = parser.parse_args()
    found = json.loads(STORE.read_text()) if STORE.exists() else {}
    with torch_threads(1):
        made = bench(options.data)
        pair = {"teacher": made.teacher, "tamed": made.tamed}
        found["base"] = {k: score(Taps(made.load(w)), made.tested)["accuracy"] for k, w in pair.items()}
        print(found["base"], file=sys.stderr, flush=True)
        for kind in options.only or KINDS:
            found[kind] = {}
            for what, degrees in TABLES.items():
                found[kind][what] = {}
                for degree in degrees:
                    found[kind][what][str(degree)] = result = one(made, kind, what, degree)
                    print(kind, what, degree, json.dumps(result), file=sys.stderr, flush=True)
    text = section(found)
    print(text)
    STORE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    put("degrees", text)


if __name__ == "__main__":
    main()
