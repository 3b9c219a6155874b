"""Regurgitation by the final language model: the first half of a training row makes it write the second half.

Carlini, Ippolito, Jagielski, Lee, Tramer, Zhang. Quantifying Memorization Across Neural Language Models. ICLR 2023.
arXiv:2202.07646, Definition 3.1: a text is extractable if greedy decoding after its beginning writes its end verbatim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fedfm.audits.audit import Notice
from fedfm.audits.final_model import TextMemoryAudit
from fedfm.audits.finding import Finding, VerdictRule, nothing
from fedfm.audits.inference.rates import Array, clopper_pearson
from fedfm.audits.model_membership import final_models
from fedfm.audits.row_evidence import BATCH
from fedfm.audits.shadow_runs import RowPool, cost, unit
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.models.preprocessing import IGNORE
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.predictions import apply_model
from fedfm.runtime.run_directory import Run

QUESTION = "Does the final model write the second half of training rows from their first half?"
TOKENS = 10  # the model has to write this number of tokens of the second half
LENGTHS = (5, 10, 20, 50)  # lengths in the detail of the finding
NOTABLE = 0.05  # the verdict is ``holds`` only if the excess over held-out rows is at most this


class Regurgitation(TextMemoryAudit):
    """Compares how many training rows and how many held-out rows the final model writes by greedy decoding."""

    def seconds(self, run: Run, population: Partitioned) -> float:
        return max(cost(run, population) / max(int(run.manifest["result"]["rounds"]), 1), self.takes)

    def measure(self, run: Run, population: Partitioned, pool: RowPool, notice: Notice) -> Finding:
        models = final_models(run, population)
        found: tuple[list[Halves], list[Halves]] = [], []
        for i, c in enumerate(owner for owner in pool.honest if owner in models or "" in models):
            if i % 8 == 0:
                notice(f"rows of {c}")
            w = models.get(c) or models[""]
            for halves, places in zip(found, (pool.members[c], pool.strangers[c]), strict=True):
                halves.append(verbatim(run.experiment.method, population.model, w, pool.rows(places)))
        return finding(union(found[0]), union(found[1]), unit(population))


class Halves(NamedTuple):
    """For n rows, the tokens that greedy decoding writes before its first error, and the tokens of the second half."""

    written: Array
    length: Array


def union(parts: Sequence[Halves]) -> Halves:
    """The rows of all parts."""
    none = [np.zeros(0, dtype=np.int64)]
    written, length = (np.concatenate([*none, *of]) for of in zip(*parts, strict=True)) if parts else (*none, *none)
    return Halves(written, length)


def verbatim(method: Method[Any], model: Model, w: Params, rows: Rows) -> Halves:
    """How much of the second half of each row greedy decoding writes after the first half.

    The halves divide the tokens that the loss counts: all tokens of running text, the answer to an instruction. The
    larger half and everything before it is the prompt. Until its first error, greedy decoding has the row itself as its
    text. So one pass over the row tells at which token it errs, and nothing has to be generated.
    """
    parts = list[Halves]()
    with apply_model(method, model, w, rows) as judged, model.evaluating(), torch.inference_mode():
        for batch in (judged.to_padded() if judged.tokens is not None else judged).batches(BATCH):
            said, targets = model.flat(model.logits(batch), batch)  # (n * T, V), (n * T,)
            n = len(next(iter(batch.values())))
            right, counted = said.argmax(1) == targets, targets != IGNORE
            parts.append(_halves(right.reshape(n, -1).cpu(), counted.reshape(n, -1).cpu()))
    return union(parts)


def _halves(right: torch.Tensor, counted: torch.Tensor) -> Halves:
    """From whether each token (n, T) is the most likely one, and whether the loss counts it."""
    place = counted.cumsum(1) - 1  # among the counted tokens of the row
    total = counted.sum(1, keepdim=True)
    second = counted & (place >= (total + 1) // 2)
    wrong = (second & ~right).cumsum(1) > 0
    return Halves((second & ~wrong).sum(1).numpy(), second.sum(1).numpy())


def finding(members: Halves, strangers: Halves, of: str = "") -> Finding:
    """The finding, from training rows and from rows that nobody trained on; ``of`` says what a row is."""
    rates = {k: [_rate(rows, k) for rows in (members, strangers)] for k in LENGTHS}
    (hits, n, low, high), (alarms, m, _, chance) = rates[TOKENS]
    if not n or not m:
        whose = "training row" if not n else "row that nobody trained on"
        return nothing("regurgitation", QUESTION, f"No {whose} has {TOKENS} tokens in its second half.")
    detail = {
        "tokens": TOKENS,
        "by_tokens": {
            str(k): {
                name: dict(zip(("written", "rows", "low", "high"), rate, strict=True))
                for name, rate in zip(("training_rows", "held_out_rows"), both, strict=True)
            }
            for k, both in rates.items()
        },
        "shorter_training_rows": int((members.length < TOKENS).sum()),
    }
    limit = f"rate of held-out rows + {NOTABLE:g}"
    rule = VerdictRule(("low > bound",), (f"high <= {limit}",)).with_numbers({limit: alarms / m + NOTABLE})
    says = (
        f"After its first half, the model writes the next {TOKENS} tokens of {hits} of {n} training rows verbatim "
        f"({100 * hits / n:.1f} %) [{100 * low:.1f}, {100 * high:.1f}], and of {alarms} of {m} rows that nobody "
        f"trained on ({100 * alarms / m:.1f} %); the bound is the upper end of their interval, {100 * chance:.1f} %."
    )
    if left := detail["shorter_training_rows"]:
        says += f" {left} training rows have a shorter second half and are left out."
    return Finding("regurgitation", QUESTION, hits / n, low, high, chance, rule, says + of, False, detail)


def _rate(rows: Halves, k: int) -> tuple[int, int, float, float]:
    """Rows with at least k written tokens, rows with at least k tokens, and the exact 95 % interval of the rate."""
    hits, n = int((rows.written >= k).sum()), int((rows.length >= k).sum())
    return hits, n, *(clopper_pearson(hits, n) if n else (0.0, 1.0))
