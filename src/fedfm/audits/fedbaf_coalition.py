"""Compute what colluding clients of a FedBaF run know: the aggregates before mixing, and the models after mixing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fedfm.aggregation.base import Aggregator
from fedfm.audits.inference import extraction
from fedfm.audits.inference.rates import Array
from fedfm.audits.recorded_run import RecordedReply, Turn
from fedfm.audits.replay import secrets
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply, Request
from fedfm.linalg.params import Params
from fedfm.methods.fedbaf.fedbaf import STILL, FedBaF
from fedfm.methods.fedbaf.matching import match
from fedfm.methods.fedbaf.pull import direction_distance
from fedfm.methods.scaffold import Scaffold
from fedfm.models.model import Model
from fedfm.runtime.client_memory import secret
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run

ROUNDS, MEMORY = 12, 1 << 30  # number of rounds that are kept, if they fit into this many bytes
ROUNDING = 1e-3  # an aggregate counts as exact if its error is below this fraction of the model's change in the round


class Target:
    """The target of the attack: the entries of the foundation model that the server mixes in.

    Attributes:
        truth: (P,) float32, the entries.
        groups: for each tensor, its slice of these entries.
        names: the names of these tensors.
        complete: whether all trainable entries are mixed.
    """

    def __init__(self, model: Model, method: FedBaF) -> None:
        found = match(model, method.foundation, method.identical)
        self._regions = {name: tuple(slice(length) for length in piece.region) for name, piece in found.pieces.items()}
        self.names = tuple(self._regions)
        self.truth = _flat([piece.tensor for piece in found.pieces.values()])
        ends = np.cumsum([piece.tensor.numel() for piece in found.pieces.values()]).tolist()
        self.groups = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        self.complete = len(self.truth) == sum(tensor.numel() for tensor in model.live().values())

    def of(self, w: Params) -> Array:
        """The entries of w that are mixed, (P,) float32."""
        return _flat([w[name][region] for name, region in self._regions.items()])

    def into(self, w: Params, x: Array) -> Params:
        """A copy of w with ``x`` in place of the entries that are mixed."""
        tensors = {name: w[name].clone() for name in self.names}
        for (name, region), g in zip(self._regions.items(), self.groups, strict=True):
            part = tensors[name][region]
            part.copy_(torch.from_numpy(x[g]).view(part.shape).to(part.dtype))
        return w.replace(tensors)


def _flat(tensors: Sequence[torch.Tensor]) -> Array:
    return np.asarray(torch.cat([t.detach().reshape(-1).float() for t in tensors]).numpy())


class Pull:
    """Line 9 of FedBaF's Algorithm 1, computed round by round from the aggregates that the attacker knows.

    Args:
        names: names of the trainable tensors, over which the norms are computed.
    """

    def __init__(self, method: FedBaF, names: Collection[str]) -> None:
        self._method, self._names = method, names
        self._reference: float | None = None
        self._calls = 0

    def __call__(self, mean: Params, w: Params, t: int) -> tuple[float, float]:
        """Return (tau_t as the paper prints it, l_t = psi tau_t / tau_ref as FedBaF uses it) for round t = 1, 2, ...

        The paper counts rounds from 0. A client that joins late does not know the tau of round 1. Instead it uses the
        first tau that it can compute.
        """
        self._calls += 1
        length = direction_distance(mean, w, self._names)
        tau = length / math.sqrt(t)
        if self._reference is None:
            if length <= STILL:
                return tau, 0.0
            self._reference = length
            self._since = t if self._calls == t else 1
        if self._method.cap == "reference":
            length = min(length, self._reference)
        if self._method.harden == "first_round" and t != self._since:
            return tau, 0.0
        return tau, self._method.psi * length / self._reference * math.sqrt(self._since / t)


class BaseStep:
    """The base method's server step, applied to the replies that some clients know.

    Args:
        aggregator: the run's aggregator; None stands for the plain mean.

    Attributes:
        names: names of the trainable tensors.
    """

    def __init__(
        self, population: Partitioned, method: FedBaF, seed: int, aggregator: Aggregator | None = None
    ) -> None:
        self._population, self._method, self._seed = population, method, seed
        self._aggregator = aggregator or Aggregator()
        self.names = tuple(population.model.live())

    def step(self, turn: Turn, own: Any, members: Collection[ClientId] | None = None) -> tuple[Params, Any]:
        """The members' estimate of w' in a round, and their state.

        The estimate is exact if ``members`` are all clients, or None.

        Args:
            own: the state as the members know it. Parts that the server sent in this round are exact. Other parts, e.g.
                the server's moments, are estimates.
        """
        known = {(s.call, s.client): s for s in turn.replies if members is None or s.client in members}
        fed = Federation(
            _ReplayedLink(known, self._population.clients),
            model=self._population.model,
            aggregator=self._aggregator if len(known) == len(turn.replies) else Aggregator(),
            seed=self._seed,
        )
        fed.begin(turn.round)
        state = self._method.base.step(fed, _known_state(turn, own), turn.round)
        return self._method.params_for(state, ""), state

    def repeat_steps(
        self, run: Run, method: FedBaF, turns: Sequence[Turn], w_0: Params, last: Aggregator | None
    ) -> tuple[Any, float]:
        """Return (state, a_t / U) after the server's steps of these rounds, with the run's own alpha.

        U is the random factor of alpha, a secret of the server; the function does not return it.

        Args:
            method: replaces the run's method.
            last: replaces the run's aggregator in the last round.
            turns: the rounds, beginning with the first; their replies may differ from the run's.
            w_0: the server's model before the first round.
        """
        self._population.model.load(w_0)
        with secrets(run) as private:
            fed = Federation(
                link := _ReplayedLink({}, self._population.clients),
                model=self._population.model,
                aggregator=self._aggregator,
                seed=self._seed,
                secret=partial(secret, private, "server"),
            )
            for turn in turns:
                link.replies = {(s.call, s.client): s for s in turn.replies}
                if turn is turns[-1]:
                    fed.aggregator = last or fed.aggregator
                    fed.begin(turn.round)
                    aggregate = method.params_for(method.base.step(fed, turn.before, turn.round), "")
                fed.begin(turn.round)
                state = method.step(fed, turn.before, turn.round)  # earlier rounds set tau_ref
            before = method.params_for(turns[-1].before, "")
            return state, method.psi * method.tau(fed, aggregate, before, turns[-1].round - 1)

    def by_controls(self, turn: Turn, members: Collection[ClientId]) -> Params:
        """The aggregate w' that a client of SCAFFOLD computes from the control variates before and after a round.

        Option II sets c_k <- c_k - c + (x - y_k) / (s_k eta_l), and c moves by |S|/K times the mean of the changes
        (arXiv:1910.06378, lines 12 and 17). So c + (K/|S|) (c_new - c) is the mean of (x - y_k) / (s_k eta_l). If all
        clients take the same number of steps s_k, this gives w' up to rounding. Otherwise the members assume that every
        client takes as many steps as they do on average.
        """
        base, rows = self._method.base, self._population.sizes()
        assert isinstance(base, Scaffold)  # noqa: S101 - lines() checks it
        x, c = turn.before.x, turn.before.c
        there = {s.client for s in turn.replies}
        own = [base.local.steps(rows[k], self._population.model) for k in sorted(there & set(members))]
        step = sum(own) / len(own) * base.local.learning_rate * base.server_learning_rate
        moved: Params = turn.after.c - c
        aggregate: Params = x - step * (c + (len(rows) / len(there)) * moved)
        return aggregate


class _ReplayedLink:
    """A link that returns the recorded replies."""

    def __init__(self, replies: Mapping[tuple[int, ClientId], RecordedReply], clients: Sequence[ClientId]) -> None:
        self.replies, self.clients = replies, clients

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        for r in requests:
            if (r.call, r.client) in self.replies:
                yield Reply(r.client, self.replies[r.call, r.client].value, r.round, r.call)


def _known_state(turn: Turn, own: Any) -> Any:
    """The state as clients know it. Parts that the server sent in this round are exact, others come from ``own``."""
    if isinstance(turn.before, Params):
        return turn.before
    sent = {id(value) for value in next(iter(turn.payloads.values()), {}).values()}
    theirs = {f.name: getattr(turn.before, f.name) for f in dataclasses.fields(turn.before)}
    return dataclasses.replace(own, **{name: value for name, value in theirs.items() if id(value) in sent})


@dataclass(frozen=True)
class Lines:
    """The T lines that a coalition knows, one for each round. The foundation model lies on each of them.

    Attributes:
        rounds: the T rounds. In each of them a member took part, and after each a member received the new model.
        u: (T, P) the coalition's estimate of the aggregate w'; exact if all clients of the cohort are members.
        v: (T, P) the new model.
        guess: (T,) l_t = psi tau_t / tau_ref as the coalition computes it; a_t is between l_t and 2 l_t.
        exact: whether u is w' up to rounding. The coalition notices this, because the lines meet in one point.
        controls: whether u comes from SCAFFOLD's control variates.
    """

    rounds: tuple[int, ...]
    u: Array
    v: Array
    guess: Array
    exact: bool = False
    controls: bool = False


def rounds_to_keep(fraction: float, clients: int, trainable: int) -> int:
    """Number of rounds whose models and replies are kept."""
    cohort = max(math.floor(fraction * clients), 1)
    fits = MEMORY // (4 * max(trainable, 1) * (cohort + 3))
    return max(2, min(max(ROUNDS, math.ceil(3 / fraction)), fits))


class Rounds:
    """A watch of a replay. It keeps the models of the first rounds, and the figures in ``curve`` of all rounds.

    Args:
        clients, rounds: the run's numbers of clients and rounds.
        trainable: number of trained values of the model.
        evaluate_every: the run's setting; in a round with an evaluation every client receives the model.
        aggregator: the run's aggregator; None stands for the plain mean.

    Attributes:
        turns: the kept rounds, with their replies.
        curve: figures of each round. ``angle`` is tau_t as the paper prints it, ``pull`` is l_t as FedBaF uses it, and
            ``error`` and ``dist`` measure the distance of w_{t+1} from w_pre. They are only written to audit.json.
        target: the entries of the foundation model that the attack computes.
        first, last: the model before the first round, and the model after the last.
    """

    def __init__(
        self,
        method: FedBaF,
        *,
        clients: int,
        rounds: int,
        trainable: int,
        seed: int,
        evaluate_every: int = 1,
        aggregator: Aggregator | None = None,
    ) -> None:
        self.method, self._seed, self._every = method, seed, evaluate_every
        self._rounds, self._aggregator = rounds, aggregator
        self.most = rounds_to_keep(method.fraction, clients, trainable)
        self.turns: list[Turn] = []
        self.curve: list[dict[str, float]] = []
        self.asked: dict[int, set[ClientId]] = {}
        self._sent: dict[int, Array] = {}  # for each kept round, the target's entries in the model

    @classmethod
    def of_run(cls, run: Run) -> Rounds:
        """The watch for a finished run."""
        experiment, manifest = run.experiment, run.manifest
        return cls(
            experiment.method_as(FedBaF),
            clients=len(manifest["clients"]),
            rounds=manifest["result"]["rounds"],
            trainable=int(manifest["model"]["trainable"]),
            seed=experiment.run.seed,
            evaluate_every=experiment.run.evaluate_every,
            aggregator=experiment.aggregation,
        )

    def see(self, turn: Turn, population: Partitioned) -> None:
        self.last = self.model(turn.after)
        if not turn.round:
            self.first = self.last
            self.start, self.target = turn.after, Target(population.model, self.method)
            self.server = BaseStep(population, self.method, self._seed, self._aggregator)
            self._own, self._pull = turn.after, Pull(self.method, self.server.names)
            return
        self.asked[turn.round] = set(turn.payloads)
        if len(self.turns) < self.most:
            self.turns.append(turn)
        mean, self._own = self.server.step(turn, self._own)
        tau, used = self._pull(mean, self.model(turn.before), turn.round)
        w = self.target.of(self.model(turn.after))
        if self.turns[-1] is turn:
            self._sent[turn.round] = w
        error, dist = (f(w, self.target.truth) for f in (extraction.relative_error, extraction.dist))
        self.curve.append({"round": turn.round, "angle": tau, "pull": used, "error": error, "dist": dist})

    def model(self, state: Any) -> Params:
        """The model of a state."""
        w: Params = self.method.params_for(state, "")
        return w

    def receives_model(self, members: Collection[ClientId], t: int) -> bool:
        """Whether a member receives the model after round t, either in the next round or for evaluation.

        With ``run.evaluate_every`` every client evaluates the model, also a client outside the cohort.
        """
        scored = t == self._rounds or (self._every and t % self._every == 0)
        return bool(scored or not self.asked.get(t + 1, set()).isdisjoint(members))

    def lines(self, members: Collection[ClientId]) -> Lines:
        """The lines that these clients know together."""
        own, full, pull = self.start, self.start, Pull(self.method, self.server.names)
        known = list[tuple[int, Array, float, bool, bool]]()
        for turn in self.turns:
            there = {s.client for s in turn.replies}
            exact = there <= set(members)
            if isinstance(self.method.base, Scaffold) and not exact:
                true, full = self.server.step(turn, full)
            if there.isdisjoint(members):
                continue
            mean, own = self.server.step(turn, own, members)
            # Members in the next cohort receive SCAFFOLD's control variate; evaluation does not send it.
            next_asked = self.asked.get(turn.round + 1, set())
            controls = isinstance(self.method.base, Scaffold) and not exact and not next_asked.isdisjoint(members)
            if controls:
                mean = self.server.by_controls(turn, members)
                # With a robust rule, attackers, or different numbers of steps, this aggregate is only an estimate.
                names = self.server.names
                off, far = (float((true.only(names) - w.only(names)).norm()) for w in (mean, self.model(turn.before)))
                exact = off <= ROUNDING * far
            _, used = pull(mean, self.model(turn.before), turn.round)
            if used and self.receives_model(members, turn.round):
                known.append((turn.round, self.target.of(mean), used, exact, controls))
        best = [line for line in known if line[3]] or [line for line in known if line[4]]
        if 1 < len(best) < len(known):
            known = best  # the other lines would only add errors
        size = len(self.target.truth)
        return Lines(
            tuple(t for t, *_ in known),
            np.array([u for _, u, *_ in known], dtype=np.float32).reshape(len(known), size),
            np.array([self._sent[t] for t, *_ in known], dtype=np.float32).reshape(len(known), size),
            np.array([used for _, _, used, *_ in known]),
            exact=bool(known) and all(line[3] for line in known),
            controls=any(line[4] for line in known),
        )
