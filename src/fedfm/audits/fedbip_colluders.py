"""One client's task vector as all other clients compute it together: they know their own, and their aggregates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedfm.audits.finding import Finding, Verdict, nothing
from fedfm.audits.inference import task_vector
from fedfm.audits.replay import Replay
from fedfm.core.client import ClientId
from fedfm.linalg.params import Params
from fedfm.methods.fedbip.fedbip import FedBip
from fedfm.models.layers import layers

Array = NDArray[Any]
MOST = 1 << 28  # entries of all task vectors together
VICTIMS, SOLVERS = 8, 6  # whose vector the others compute; who of them solve for it
AGREES = 1e-4  # of what colluders know: rounding
EXACT = 0.99  # cosine from which on a vector counts as read
SHOWN = "If clients were shown their weights, could all but one compute that one's task vector?"
UNSHOWN = "And where they are shown none, as in this run?"


@dataclass(frozen=True)
class Full:
    """A round in which every client took part: what they sent, and what came back."""

    round: int
    tau: Mapping[ClientId, Params]
    before: Mapping[ClientId, Params]
    after: Mapping[ClientId, Params]
    p: Array  # (L, K, K)


def colluders(replay: Replay, full: Full | None) -> list[Finding]:
    """Two findings: with the weights shown, and without.

    Args:
        full: the last round in which all took part and after which their aggregates were sent to them.
    """
    shown, unshown = "task_vector.colluders_shown", "task_vector.colluders"
    method = replay.run.experiment.method
    why = ""
    if not isinstance(method, FedBip):
        why = "What is solved for is a vector in FedBip's sums; those of other methods are not."
    elif full is None or len(full.tau) < 2:
        why = "There is no round of all clients whose aggregates they were sent before the end."
    elif method.aggregate != "task_vector" or method.norm_cap is not None or method.space != "factors":
        why = "Aggregates of parameters, of cut vectors or of products of factors are not solved for."
    elif len(full.tau) * sum(x.numel() for x in next(iter(full.tau.values())).values()) > MOST:
        why = "All vectors together are too long to be solved for in memory."
    if why or full is None:
        return [nothing(shown, SHOWN, why), nothing(unshown, UNSHOWN, why)]
    pieces = list(layers(replay.population.model, method.granularity).values())
    clients = sorted(full.tau)
    victims = [clients[round(i)] for i in np.linspace(0, len(clients) - 1, min(VICTIMS, len(clients))).tolist()]
    attack = _Coalition(full, pieces, clients, method)
    found = [_summary(shown, SHOWN, full, clients, [attack.shown(v) for v in victims])]
    if method.similarity != "cosine" or method.weights_from != "task_vector":
        return [*found, nothing(unshown, UNSHOWN, "Solved for cosines of task vectors alone, not for these weights.")]
    return [*found, _summary(unshown, UNSHOWN, full, clients, [attack.unshown(v) for v in victims])]


@dataclass(frozen=True)
class _Read:
    """What a coalition made of one client's vector: cosine and relative error; own: the best cosine without it."""

    cosine: float
    error: float
    own: float
    candidates: int


class _Coalition:
    """All clients but one, layer by layer in float64."""

    def __init__(self, full: Full, pieces: Sequence[Sequence[str]], clients: Sequence[ClientId], method: Any) -> None:
        self._full, self._pieces, self._clients, self._method = full, pieces, clients, method

    def shown(self, victim: ClientId) -> _Read:
        """By the weights of the colluder that has most of the victim, a layer at a time."""
        v = self._clients.index(victim)
        parts = []
        for layer, names in enumerate(self._pieces):
            p = self._full.p[layer]
            i = max((k for k in range(len(self._clients)) if k != v), key=lambda k: abs(p[k, v]))
            truth, others, _ = self._vectors(names, v)
            if p[i, v]:
                known = np.delete(p[i], v)
                guess = task_vector.shown(self._change(names, i), others, known, float(p[i, v]))
            else:
                guess = np.zeros_like(truth)
            parts.append((truth, guess, others))
        return self._judged(parts, 1)

    def unshown(self, victim: ClientId) -> _Read:
        """From the formula of the weights alone; where an equation has several solutions, other colluders decide."""
        v = self._clients.index(victim)
        parts, most = [], 0
        for names in self._pieces:
            truth, others, rows = self._vectors(names, v)
            able = [at for at in range(len(rows)) if others[at].any()]  # a zero vector has no cosine
            able = sorted(able, key=self._explained(names, others, able, rows))
            known = others[able]
            changes = [self._change(names, rows[at]) for at in able[:SOLVERS]]
            solved: list[Array] = []
            for n, change in enumerate(changes):
                solved += task_vector.unshown(change, known, n, self._method.negative, self._method.temperature)
                if n + 1 >= 2 and solved and min(self._error(x, known, changes) for x in solved) < AGREES:
                    break
            if len(able) > 1:
                best = min(solved, key=lambda x: self._error(x, known, changes), default=None)
            else:  # nobody else to ask: the worst of them
                best, most = min(solved, key=lambda x: _cosine(x, truth), default=None), max(most, len(solved))
            parts.append((truth, np.zeros_like(truth) if best is None else best, others))
        return self._judged(parts, max(most, 1))

    def _explained(
        self, names: Sequence[str], others: Array, able: Sequence[int], rows: Sequence[int]
    ) -> Callable[[int], float]:
        """How much of a colluder's change the colluders' own vectors explain; where all, it has none of the victim."""
        x = others[able]
        norms = np.linalg.norm(x, axis=1)
        g = task_vector.weight(x @ x.T / np.outer(norms, norms), self._method.negative, self._method.temperature)
        rest = {}
        for row, at in enumerate(able):
            change = self._change(names, rows[at])
            unknown = float(np.linalg.norm(change - g[row] @ x / g[row].sum()))
            rest[at] = unknown / max(float(np.linalg.norm(change)), 1e-30)
        return lambda at: -rest[at]

    def _error(self, x: Array, known: Array, changes: Sequence[Array]) -> float:
        """How far the colluders' aggregates are from what they would be if x were the victim's vector, relative."""
        every = np.vstack([known, x])
        norms = np.linalg.norm(every, axis=1)
        wrong = []
        for at, change in enumerate(changes):
            cosines = every @ every[at] / np.where(norms * norms[at] > 0, norms * norms[at], 1)
            g = task_vector.weight(cosines, self._method.negative, self._method.temperature)
            scale = float(np.linalg.norm(change))
            wrong.append(float(np.linalg.norm(g @ every / g.sum() - change)) / scale if scale else 0.0)
        return float(np.mean(wrong))

    def _vectors(self, names: Sequence[str], v: int) -> tuple[Array, Array, list[int]]:
        """(the victim's (P,), the others' (K - 1, P), their places)."""
        rows = [k for k in range(len(self._clients)) if k != v]
        tau = [_flat(self._full.tau[c], names) for c in self._clients]
        return tau[v], np.stack([tau[k] for k in rows]), rows

    def _change(self, names: Sequence[str], i: int) -> Array:
        c = self._clients[i]
        return _flat(self._full.after[c], names) - _flat(self._full.before[c], names)

    def _judged(self, parts: Sequence[tuple[Array, Array, Array]], candidates: int) -> _Read:
        truth = np.concatenate([t for t, _, _ in parts])
        guess = np.concatenate([g for _, g, _ in parts])
        others = np.concatenate([o for _, _, o in parts], axis=1)
        error = float(np.linalg.norm(guess - truth) / max(float(np.linalg.norm(truth)), 1e-30))
        return _Read(_cosine(guess, truth), error, max(_cosine(o, truth) for o in others), candidates)


def _summary(name: str, question: str, full: Full, clients: Sequence[ClientId], read: Sequence[_Read]) -> Finding:
    cosines, errors = [r.cosine for r in read], [r.error for r in read]
    estimate, line = float(np.median(cosines)), float(np.median([r.own for r in read]))
    verdict: Verdict = "leaks" if estimate > EXACT else "inconclusive" if estimate > line else "holds"
    says = f"Round {full.round}, {len(clients)} clients, {len(read)} of them as the victim: cosine {estimate:.6f} with "
    says += (
        f"the true vector (median; {min(cosines):.4f} to {max(cosines):.4f}), relative error {np.median(errors):.2g} "
    )
    says += f"(median); the likest of the others' own vectors has cosine {line:.3f}."
    many = max(r.candidates for r in read)
    if many > 1:
        says += f" The equation has {many} solutions, one of which is the vector; the figures are of the worst of them."
    detail = {"relative_error": errors, "cosine": cosines, "round": full.round, "solutions": many}
    return Finding(name, question, estimate, min(cosines), max(cosines), line, verdict, says, False, detail)


def _flat(w: Params, names: Sequence[str]) -> Array:
    found: Array = torch.cat([w[n].reshape(-1).double() for n in names]).numpy()
    return found


def _cosine(a: Array, b: Array) -> float:
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale else 0.0
