"""An attack by all clients except one: they compute that client's task vector from their own vectors and aggregates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedfm.audits.finding import Finding, VerdictRule, nothing
from fedfm.audits.inference import task_vector
from fedfm.audits.inference.rates import Array
from fedfm.audits.inference.vectors import vector
from fedfm.audits.replay import Replay
from fedfm.core.client import ClientId
from fedfm.linalg.params import Params
from fedfm.methods.fedbip.fedbip import FedBip
from fedfm.models.layers import layers

MOST = 1 << 28  # largest number of entries of all task vectors together
VICTIMS, SOLVERS = 8, 6  # largest number of victims, and of colluders that solve for each victim
AGREES = 1e-4  # a smaller relative error of an aggregate counts as rounding
EXACT = 0.99  # a vector with at least this cosine counts as recovered
RECOVERED = VerdictRule((f"estimate > {EXACT}",), ("estimate <= bound",))
SHOWN = "If clients received their weights, could all clients but one compute that client's task vector?"
UNSHOWN = "Can all clients but one compute that client's task vector without the weights, as in this run?"


@dataclass(frozen=True)
class Full:
    """The messages of a round in which every client took part."""

    round: int
    tau: Mapping[ClientId, Params]
    before: Mapping[ClientId, Params]
    after: Mapping[ClientId, Params]
    p: Array  # (L, K, K)


def colluders(replay: Replay, full: Full | None) -> list[Finding]:
    """Two findings: one if clients know the weights, and one if they do not.

    Args:
        full: the last round in which all clients took part and received their aggregates afterwards.
    """
    shown, unshown = "task_vector.colluders_shown", "task_vector.colluders"
    method = replay.run.experiment.method
    why = ""
    if not isinstance(method, FedBip):
        why = "The attack can only solve FedBip's sums."
    elif full is None or len(full.tau) < 2:
        why = "In no round did all clients take part and receive their aggregates afterwards."
    elif method.aggregate != "task_vector" or method.norm_cap is not None or method.space != "factors":
        why = "The attack cannot solve aggregates of parameters, of clipped vectors or of products of factors."
    elif len(full.tau) * sum(x.numel() for x in next(iter(full.tau.values())).values()) > MOST:
        why = "All vectors together are too long for the memory of the attack."
    if why or full is None or not isinstance(method, FedBip):
        return [nothing(shown, SHOWN, why), nothing(unshown, UNSHOWN, why)]
    pieces = list(layers(replay.population.model, method.granularity).values())
    clients = sorted(full.tau)
    victims = [clients[round(i)] for i in np.linspace(0, len(clients) - 1, min(VICTIMS, len(clients))).tolist()]
    attack = _Coalition(full, pieces, clients, method)
    found = [_summary(shown, SHOWN, full, clients, [attack.reconstruct(v) for v in victims])]
    if method.similarity != "cosine" or method.weights_from != "task_vector":
        return [
            *found,
            nothing(
                unshown, UNSHOWN, "The attack can only solve weights that are computed from cosines of task vectors."
            ),
        ]
    return [*found, _summary(unshown, UNSHOWN, full, clients, [attack.reconstruct_without_weights(v) for v in victims])]


@dataclass(frozen=True)
class _Read:
    """Figures about a coalition's estimate of one client's vector.

    ``own`` is the largest cosine between one of the coalition's own vectors and the true vector.
    """

    cosine: float
    error: float
    own: float
    candidates: int


class _Coalition:
    """The attack by all clients except one. They solve each layer separately, in float64."""

    def __init__(
        self, full: Full, pieces: Sequence[Sequence[str]], clients: Sequence[ClientId], method: FedBip
    ) -> None:
        self._full, self._pieces, self._clients, self._method = full, pieces, clients, method

    def reconstruct(self, victim: ClientId) -> _Read:
        """Reconstruct the victim's vector with known weights.

        Each layer is solved by the colluder in whose aggregate the victim has most weight in this layer.
        """
        v = self._clients.index(victim)
        parts = []
        for layer, names in enumerate(self._pieces):
            p = self._full.p[layer]
            i = max((k for k in range(len(self._clients)) if k != v), key=lambda k: abs(p[k, v]))
            truth, others, _ = self._vectors(names, v)
            if p[i, v]:
                known = np.delete(p[i], v)
                guess = task_vector.solve_victim(self._change(names, i), others, known, float(p[i, v]))
            else:
                guess = np.zeros_like(truth)
            parts.append((truth, guess, others))
        return _read_of(parts, 1)

    def reconstruct_without_weights(self, victim: ClientId) -> _Read:
        """Reconstruct the victim's vector without known weights, from the formula that FedBip's weights follow.

        The equation of one colluder may have several solutions. The other colluders choose among them.
        """
        v = self._clients.index(victim)
        parts, most = [], 0
        for names in self._pieces:
            truth, others, rows = self._vectors(names, v)
            able = [at for at in range(len(rows)) if others[at].any()]  # leave out zero vectors, which have no cosine
            able = sorted(able, key=self._explained_share(names, others, able, rows))
            known = others[able]
            changes = [self._change(names, rows[at]) for at in able[:SOLVERS]]
            solved: list[Array] = []
            for n, change in enumerate(changes):
                solved += task_vector.vectors_without_weights(
                    change, known, n, self._method.negative, self._method.temperature
                )
                if n + 1 >= 2 and solved and min(self._error(x, known, changes) for x in solved) < AGREES:
                    break
            if len(able) > 1:
                best = min(solved, key=lambda x: self._error(x, known, changes), default=None)
            else:  # no other colluder can choose, so take the worst solution
                best, most = min(solved, key=lambda x: _cosine(x, truth), default=None), max(most, len(solved))
            parts.append((truth, np.zeros_like(truth) if best is None else best, others))
        return _read_of(parts, max(most, 1))

    def _explained_share(
        self, names: Sequence[str], others: Array, able: Sequence[int], rows: Sequence[int]
    ) -> Callable[[int], float]:
        """A sort key of a colluder: minus the fraction of its aggregate's change that the known vectors do not explain.

        The fraction is 0 if the victim's vector has no weight in the change.
        """
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
        """Relative error of the colluders' aggregates if x were the victim's vector."""
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
        """The victim's vector (P,), the other clients' vectors (K - 1, P), and the indices of these clients."""
        rows = [k for k in range(len(self._clients)) if k != v]
        tau = [_vector(self._full.tau[c], names) for c in self._clients]
        return tau[v], np.stack([tau[k] for k in rows]), rows

    def _change(self, names: Sequence[str], i: int) -> Array:
        c = self._clients[i]
        return _vector(self._full.after[c], names) - _vector(self._full.before[c], names)


def _read_of(parts: Sequence[tuple[Array, Array, Array]], candidates: int) -> _Read:
    """Figures over all layers; each part has one layer's true vector, its estimate and the colluders' vectors."""
    truth, guess = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    others = np.concatenate([o for _, _, o in parts], axis=1)
    error = float(np.linalg.norm(guess - truth) / max(float(np.linalg.norm(truth)), 1e-30))
    return _Read(_cosine(guess, truth), error, max(_cosine(o, truth) for o in others), candidates)


def _summary(name: str, question: str, full: Full, clients: Sequence[ClientId], read: Sequence[_Read]) -> Finding:
    cosines, errors = [r.cosine for r in read], [r.error for r in read]
    estimate, line = float(np.median(cosines)), float(np.median([r.own for r in read]))
    says = f"Round {full.round}, {len(clients)} clients, {len(read)} of them as the victim: cosine {estimate:.6f} with "
    says += f"the true vector (median; {min(cosines):.4f} to {max(cosines):.4f}), relative error "
    says += f"{np.median(errors):.2g} (median); the most similar of the others' own vectors has cosine {line:.3f}."
    many = max(r.candidates for r in read)
    if many > 1:
        says += f" The equation has {many} solutions, one of which is the vector; the figures are of the worst one."
    detail = {"relative_error": errors, "cosine": cosines, "round": full.round, "solutions": many}
    return Finding(name, question, estimate, min(cosines), max(cosines), line, RECOVERED, says, False, detail)


def _vector(w: Params, names: Sequence[str]) -> Array:
    return vector(w[name] for name in names)


def _cosine(a: Array, b: Array) -> float:
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale else 0.0
