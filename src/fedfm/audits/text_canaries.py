"""Canaries for language models: a shadow run trains on random texts, and its model should not recognise them.

Carlini, Liu, Erlingsson, Kos, Song. The Secret Sharer: Evaluating and Testing Unintended Memorization in Neural
Networks. USENIX Security 2019. arXiv:1802.08232, Definition 2: exposure = log2 |R| - log2 rank, by the loss.

Each canary has candidates of its own. So if the model remembers nothing, the ranks of canaries are independent and
uniform, and an exact interval covers the share of canaries that rank first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedfm import seeds
from fedfm.audits.audit import Notice
from fedfm.audits.final_model import TextMemoryAudit
from fedfm.audits.finding import ABOVE, Finding, nothing
from fedfm.audits.inference.rates import NOTABLE_TPR, Array, clopper_pearson
from fedfm.audits.row_evidence import evidence
from fedfm.audits.shadow_runs import BUDGET, Half, RowPool, cost, shadow_models
from fedfm.audits.stated_epsilon import Claim, claim_of_model
from fedfm.core.client import ClientData, ClientId
from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.models.model import Model
from fedfm.models.preprocessing import IGNORE
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run

QUESTION = "Does the final model recognise random texts that one client trained on once?"
CANARIES = 80  # number of canaries that are trained on once; with fewer, no interval would end below the bound
COPIES = 4  # copies of each further canary; there are a quarter as many of these as of canaries with one copy
SHARE = 8  # for this number of rows of all clients together, there is one canary with one copy
LENGTH = 8  # random tokens of a canary
CANDIDATES = 100  # texts that are ranked: the canary, and others that nobody trained on


class TextCanaries(TextMemoryAudit):
    """Adds random texts to clients' rows, trains again, and ranks each text among its candidates."""

    def seconds(self, run: Run, population: Partitioned) -> float:
        number, _ = shadow_runs(run, population, sum(population.sizes().values()))
        return max(number * 1.5 * cost(run, population), self.takes)

    def measure(self, run: Run, population: Partitioned, pool: RowPool, notice: Notice) -> Finding:
        method, seed = run.experiment.method, run.experiment.run.seed
        number, once = shadow_runs(run, population, sum(len(pool.members[c]) for c in pool.honest))
        w_0, ranks = population.model.params(), {1: [np.zeros(0)], COPIES: [np.zeros(0)]}
        for s in range(number if once else 0):
            notice(f"shadow run {s + 1} of {number}, with {once} canaries")
            planted = PlantedTexts(pool, once, seeds.generator(seed, "audit", "text canaries", s))
            population.model.load(w_0)
            shadows = shadow_models(run, planted, s)
            for c, canaries in planted.canaries.items():
                if (w := shadows.get(c, shadows.get(""))) is None:  # the client does not disclose its own model
                    continue
                rows = canaries.candidates(pool, population.model)
                scores = evidence(method, population.model, w, rows).reshape(-1, CANDIDATES)
                for copies, of in ranks.items():
                    of.append(ranks_of(scores[canaries.copies == copies]))
        return finding({copies: np.concatenate(of) for copies, of in ranks.items()}, number, claim_of_model(run))


def shadow_runs(run: Run, population: Partitioned, rows: int) -> tuple[int, int]:
    """The number of shadow runs, and of canaries with one copy in each, for this number of rows of all clients."""
    once = min(-(-rows // SHARE), CANARIES)
    seconds = cost(run, population)
    affordable = int(BUDGET / seconds) if seconds else CANARIES
    return min(-(-CANARIES // max(once, 1)), max(affordable, 1)), once


@dataclass(frozen=True)
class ClientCanaries:
    """The n canaries of a client. Each is a row of the client, in which the tokens that the loss counts are random.

    Attributes:
        places: (n,) the rows.
        copies: (n,) how often the canary is among the client's rows.
        texts: (n, CANDIDATES, LENGTH) the canary, and the other candidates.
    """

    places: Array
    copies: Array
    texts: Array

    def candidates(self, pool: RowPool, model: Model) -> Rows:
        """The candidates of all canaries, one after the other; the first of each is the canary."""
        return with_texts(pool.rows(np.repeat(self.places, CANDIDATES)), self.texts.reshape(-1, LENGTH), model, 0)


class PlantedTexts(Half):
    """The clients' own rows, and canaries among them.

    Attributes:
        canaries: by client.
    """

    def __init__(self, pool: RowPool, once: int, rng: np.random.Generator) -> None:
        super().__init__(pool, 0, 0)
        self.taken = {c: (pool.members[c], np.ones(len(pool.members[c]), dtype=bool)) for c in pool.owners}
        everyone = np.concatenate([pool.members[c] for c in pool.honest])
        copies = np.repeat([1, COPIES], [once, -(-once // COPIES)])
        places = rng.choice(everyone, len(copies), replace=len(copies) > len(everyone))
        texts = rng.choice(vocabulary_of(self.model, pool.rows(everyone)), (len(copies), CANDIDATES, LENGTH))
        at = {c: np.isin(places, pool.members[c]) for c in pool.honest}
        self.canaries = {c: ClientCanaries(places[own], copies[own], texts[own]) for c, own in at.items() if own.any()}

    def data(self, client: ClientId) -> ClientData:
        """The client's rows in this shadow run, with its canaries."""
        data = super().data(client)
        return ClientData(lambda: self._train(client), lambda: data.val, lambda: data.test)

    def _train(self, client: ClientId) -> Rows:
        owners = [client] if client in self.taken else [*self.taken]  # the second is POOLED, which has all rows
        before = np.sort(np.concatenate([self.taken[c][0] for c in owners]))
        found = [self.canaries[c] for c in owners if c in self.canaries]
        places = [np.repeat(canaries.places, canaries.copies) for canaries in found]
        texts = [np.repeat(canaries.texts[:, 0], canaries.copies, 0) for canaries in found]
        rows = self._pool.rows(np.concatenate([before, *places]))
        return with_texts(rows, np.concatenate(texts), self.model, len(before)) if texts else rows


def vocabulary_of(model: Model, rows: Rows) -> Array:
    """Tokens (V,) of the texts that the loss counts, without the tokenizer's special tokens."""
    told = rows.tensors["targets"] if "targets" in rows.tensors else rows.tokens.concatenate()  # type: ignore[union-attr]
    return np.setdiff1d(np.unique(told.numpy()), [IGNORE, *model.tools.tokenizer.all_special_ids])


def with_texts(rows: Rows, texts: Array, model: Model, first: int) -> Rows:
    """The rows; from row ``first`` on, the tokens that the loss counts are the last ones of a row, and are ``texts``.

    Args:
        texts: token ids (len(rows) - first, L).
    """
    length, changed = texts.shape[1], slice(first, None)
    if "targets" in rows.tensors:  # an encoder-decoder: its targets change, its input stays as it is
        targets = rows.tensors["targets"]
        wide = torch.nn.functional.pad(targets, (0, max(length - targets.shape[1], 0)), value=IGNORE)
        wide[changed] = IGNORE
        wide[changed, :length] = torch.from_numpy(texts).to(wide.dtype)
        return replace(rows, tensors=rows.tensors | {"targets": wide})
    assert rows.tokens is not None  # noqa: S101 - these are all tasks of texts
    room, tensors = model.tools.max_length - length, {n: t.clone() for n, t in rows.tensors.items()}
    starts = torch.ones(len(rows), dtype=torch.int64)  # running text keeps the first token of the block
    if "answer_start" in tensors:
        starts = tensors["answer_start"]
        starts[changed] = starts[changed].clamp(max=room)
    if "answer_spans" in tensors:
        tensors["answer_spans"][changed] = 0
        tensors["answer_spans"][changed, 0] = torch.stack([starts[changed], starts[changed] + length], 1)
    whole = list(rows.tokens)
    for i, text in enumerate(texts, first):
        whole[i] = torch.cat([whole[i][: int(starts[i])], torch.from_numpy(text).long()])
    return replace(rows, tokens=Tokens.of(whole), tensors=tensors)


def ranks_of(scores: Array) -> Array:
    """The rank (n,) of the first score in each row (n, N); other scores that equal it rank before it."""
    return np.asarray(1 + (scores[:, 1:] >= scores[:, :1]).sum(1))


def exposure(ranks: Array) -> float:
    """The mean of log2 N - log2 rank, in bits; with uniform ranks it is 1.40 on average."""
    return float(np.mean(math.log2(CANDIDATES) - np.log2(ranks)))


def finding(ranks: Mapping[int, Array], number: int, claim: Claim | None) -> Finding:
    """The finding, from the ranks of the canaries by their number of copies, in this number of shadow runs."""
    if not len(ranks[1]):
        return nothing("text_canaries", QUESTION, "No client has training rows and discloses its model.")
    by_copies = {copies: _first(of) for copies, of in ranks.items() if len(of)}
    one = by_copies[1]
    rate = one["first"] / one["canaries"]
    detail: dict[str, Any] = {"by_copies": {str(copies): of for copies, of in by_copies.items()}}
    detail |= {"candidates": CANDIDATES, "tokens": LENGTH, "shadow_runs": number}
    says = (
        f"Of {one['canaries']} random texts of {LENGTH} tokens that a client had once, {one['first']} "
        f"({100 * rate:.1f} %) [{100 * one['low']:.1f}, {100 * one['high']:.1f}] have the smallest loss of "
        f"{CANDIDATES} such texts; guessing gives {100 / CANDIDATES:g} %, the bound is {100 * NOTABLE_TPR:g} %. Their "
        f"mean exposure is {one['exposure']:.2f} of at most {math.log2(CANDIDATES):.2f} bits; guessing gives "
        f"{exposure(np.arange(1, CANDIDATES + 1)):.2f}."
    )
    if (more := by_copies.get(COPIES)) is not None:
        says += (
            f" Of {more['canaries']} texts that a client had {COPIES} times, {more['first']} do, with a mean exposure "
            f"of {more['exposure']:.2f}."
        )
    if claim is not None:
        allowed = min(math.exp(min(claim.epsilon, 50.0)) / CANDIDATES + claim.delta, 1.0)
        detail["allowed_by_epsilon"] = allowed
        says += f" epsilon = {claim.epsilon:.4g} allows {100 * allowed:.3g} % for texts that a client had once."
    return Finding("text_canaries", QUESTION, rate, one["low"], one["high"], NOTABLE_TPR, ABOVE, says, False, detail)


def _first(ranks: Array) -> dict[str, Any]:
    hits = int((ranks == 1).sum())
    low, high = clopper_pearson(hits, len(ranks))
    return {"first": hits, "canaries": len(ranks), "low": low, "high": high, "exposure": exposure(ranks)}
