"""Extraction of the server's foundation model from the models that the server sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from fedfm import seeds
from fedfm.aggregation.base import Aggregator
from fedfm.audits.audit import Audit
from fedfm.audits.fedbaf_coalition import BaseStep, Lines, Pull, Rounds
from fedfm.audits.fidelity import Fidelity
from fedfm.audits.finding import Finding, VerdictRule, nothing
from fedfm.audits.inference import extraction
from fedfm.audits.inference.extraction import NoIntersectionError
from fedfm.audits.inference.rates import Array
from fedfm.audits.replay import Replay
from fedfm.core.client import ClientId, Update
from fedfm.core.federation import Federation
from fedfm.linalg.params import Params
from fedfm.linalg.running_mean import RunningMean
from fedfm.linalg.threads import one_thread, torch_threads
from fedfm.methods.fedbaf.fedbaf import LOG_RANGE, FedBaF
from fedfm.privacy.gaussian import sigma_for
from fedfm.runtime.run_directory import Run

LINE = 0.1  # below this relative error the model counts as disclosed
ALIKE = 0.9  # above this cosine of the features the model counts as disclosed at any error
FAR, UNLIKE = 0.5, 0.5  # if the error is above the first and the cosine below the second, the model counts as secret
EXACT = 1e-3  # a smaller relative error is due to rounding
SHARES = (0.5, 0.2, 0.1)
DRAWS = 5  # number of random coalitions for each fraction of the clients
ALONE = 10  # largest number of single clients whose attacks are tried
GUARANTEE = (1.0, 1e-5)  # (epsilon, delta) of the statement about noise that is drawn only once

ALL = "Can all clients together compute the server's foundation model?"
SUMS = "Does it protect the foundation model if the server sees only sums of updates?"
ONE = "Can one passive client compute the foundation model?"
ACTIVE = "Can one client that sends a reversed update compute the foundation model?"


class Extraction(Audit):
    """Measures the relative error of the foundation model that coalitions of clients compute, and scores this model."""

    methods: ClassVar[tuple[str, ...]] = ("fedbaf",)
    replies: ClassVar[bool] = False
    takes: ClassVar[float] = 20.0

    def unfit(self, run: Run) -> str | None:
        method, rounds = run.experiment.method_as(FedBaF), run.manifest["result"]["rounds"]
        if not rounds or not method.psi:
            return f"with {'psi = 0' if rounds else 'no round'} no foundation model is mixed in"
        return None

    def watch(self, run: Run) -> Rounds:
        return Rounds.of_run(run)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        rounds = replay.watch(Rounds)
        if not any(r["pull"] for r in rounds.curve):
            return [
                nothing("extraction.all_colluding", ALL, "No foundation model was mixed in: the model never moved.")
            ]
        # Vectors are long and matrices small, so threads would wait far longer than they compute.
        with torch_threads(1), one_thread():
            attack = _Attack(replay, rounds)
            found = [everyone := attack.everyone(), sums(everyone)]
            notice("coalitions of some clients")
            found += [f for share in SHARES if (f := attack.share(share)) is not None]
            found.append(attack.alone())
            notice("one active client")
            return [*found, attack.active()]


def _range(method: FedBaF, guess: Any) -> tuple[Any, Any]:
    """The range (low, high) of c_t = 1 + 1/a_t, if ``guess`` is l_t; see :class:`Lines`."""
    least, most = LOG_RANGE if method.harden == "log_uniform" else (1.0, 2.0)
    return extraction.place(least * guess, most * guess)


def recover(lines: Lines, method: FedBaF, groups: extraction.Groups, *, exact: bool) -> tuple[Array, str]:
    """Estimate w_pre from a coalition's lines; returns the estimate and the name of the estimator.

    The estimator depends on ``method.harden``. The attacker knows all settings of the method, but not alpha.

    Args:
        exact: whether ``lines.u`` is w' itself, rather than an estimate.

    Raises:
        NoIntersectionError: there is no line.
    """
    u, v, guess = lines.u, lines.v, lines.guess
    if not len(u):
        raise NoIntersectionError("in no round was anything mixed in")
    low, high = _range(method, guess)
    # A coalition that is only a part of the cohort does not know which half of the tensors a round mixed. If alpha
    # differs by coordinate and u is wrong, intervals err more than an estimator that assumes one alpha for a round.
    log = method.harden == "log_uniform"
    if log or method.harden == ("per_coordinate" if exact else "half"):
        x = extraction.coordinatewise(u, v, low, high, "log" if log else "uniform")
        return x, "intervals of every coordinate"
    if not exact:
        if method.harden != "per_tensor":
            return extraction.alternating(u, v, guess), "alternating estimate"
        x = np.empty(u.shape[1])
        for g in groups:
            x[g] = extraction.alternating(u[:, g], v[:, g], guess)
        return x, "alternating estimate of every tensor"
    try:
        if method.harden == "half":
            return extraction.intersection(u, v, groups), "intersection of lines"
        if method.harden not in ("per_tensor", "noise_afresh"):
            return extraction.intersection(u, v), "intersection of lines"
    except NoIntersectionError:
        pass
    if method.harden in ("per_tensor", "half"):
        return extraction.tensorwise(u, v, groups, low, high)[0], "intersection of every tensor's lines"
    x, met = extraction.tensorwise(u, v, [slice(None)], low, high)
    return x, "nearest point of lines within their range" if met else "range of one line"


class _Attack:
    """All attacks on one run."""

    def __init__(self, replay: Replay, rounds: Rounds) -> None:
        self.replay, self.rounds, self.method, self.target = replay, rounds, rounds.method, rounds.target
        self.seed = replay.run.experiment.run.seed
        self.clients = tuple(replay.population.clients)
        self.frame = rounds.last  # every client knows the entries that are not mixed
        true = self.target.into(self.frame, self.target.truth)
        self.fidelity = Fidelity(replay.population, true, complete=self.target.complete, seed=self.seed)
        self.true = self.fidelity.ability(true)
        self.start = self.fidelity.ability(rounds.first)

    # --- coalitions ---------------------------------------------------------------------------------------------------
    def everyone(self) -> Finding:
        """The finding if all clients collude. Together they know w' itself."""
        name, lines = "extraction.all_colluding", self.rounds.lines(self.clients)
        try:
            x, how = recover(lines, self.method, self.target.groups, exact=True)
        except NoIntersectionError as error:
            return nothing(name, ALL, f"No: {error}.")
        curve = self.rounds.curve
        end = curve[-1]["error"]
        detail = {"how": how, "rounds": lines.rounds, "curve": curve, "final_model_error": end}
        says = f"All {len(self.clients)} clients together compute {self._sentence(x, lines, how)}"
        says += f" Without any attack, the run's final model is {end:.3g} away from it."
        if self.method.harden == "noise_once":
            # All messages are functions of one noisy model w_pre + sigma N; the start weights determine sigma.
            w_0 = self.rounds.first.only(self.rounds.server.names)
            sigma = self.method.noise * w_0.norm() / math.sqrt(sum(t.numel() for t in w_0.values()))
            detail["hidden_change"] = change = sigma / sigma_for(*GUARANTEE)
            says += (
                f" For any number of rounds, with (epsilon, delta) = {GUARANTEE}, the noise hides which of two "
                f"foundation models the server has, if their distance is at most {change:.3g} "
                f"({change / float(np.linalg.norm(self.target.truth)):.2g} times the norm of this model)."
            )
        return self._finding(name, ALL, x, says, detail)

    def share(self, share: float) -> Finding | None:
        """The finding for random coalitions of a fraction of the clients; None if they have fewer than two clients."""
        size = math.floor(share * len(self.clients) + 1e-9)
        if size < 2:
            return None
        name = f"extraction.colluding_{100 * share:.0f}"
        rng = seeds.generator(self.seed, "audit", "extraction", size)
        drawn = [tuple(sorted(rng.choice(self.clients, size, replace=False).tolist())) for _ in range(DRAWS)]
        question = f"Can {100 * share:.0f} % of the clients together compute the foundation model?"
        return self._some(name, question, drawn, f"{size} of {len(self.clients)} clients together")

    def alone(self) -> Finding:
        """The finding for one passive client, repeated for several clients."""
        took = {c: sum(any(s.client == c for s in turn.replies) for turn in self.rounds.turns) for c in self.clients}
        chosen = sorted(self.clients, key=lambda c: (-took[c], c))[:ALONE]
        return self._some("extraction.one_client", ONE, [(c,) for c in sorted(chosen)], "One passive client")

    def _some(self, name: str, question: str, drawn: Sequence[tuple[ClientId, ...]], who: str) -> Finding:
        found = []
        for members in drawn:
            lines = self.rounds.lines(members)
            try:
                x, how = recover(lines, self.method, self.target.groups, exact=lines.exact)
            except NoIntersectionError:
                continue
            how += ", aggregates from SCAFFOLD's control variates" if lines.controls else ""
            found.append((extraction.relative_error(x, self.target.truth), members, x, lines, how))
        if not found:
            return nothing(name, question, f"{who}: took part in none of the first {len(self.rounds.turns)} rounds.")
        found.sort(key=lambda f: f[0])
        _, members, x, lines, how = found[(len(found) - 1) // 2]
        low, high = found[0][0], found[-1][0]
        spread = f" Over {len(found)} such {'clients' if len(members) == 1 else 'coalitions'}: {low:.3g} to {high:.3g}."
        says = f"{who} compute{'s' if len(members) == 1 else ''} {self._sentence(x, lines, how)}"
        says += spread if len(found) > 1 else ""
        detail = {"how": how, "rounds": lines.rounds, "errors": {" ".join(m): e for e, m, *_ in found}}
        return self._finding(name, question, x, says, detail, low, high)

    # --- one client that does not follow the method -------------------------------------------------------------------
    def active(self) -> Finding:
        """The finding for one reversed update: under each of the two caps, and under a norm check at the server."""
        name, chosen = "extraction.active_client", self._when()
        if self.method.harden == "first_round":
            says = "The only round that mixes has a_t = psi U, whatever clients send."
            return nothing(name, ACTIVE, says)
        if chosen is None:
            return nothing(name, ACTIVE, "No client took part in two rounds and received the model after the second.")
        client, t, share = chosen
        own, other = self.method.cap, "none" if self.method.cap == "reference" else "reference"
        variants: dict[str, tuple[FedBaF, Aggregator | None, bool]] = {
            f"cap = {own}": (self.method, None, True),
            f"cap = {other}": (replace(self.method, cap=other), None, True),
            f"cap = {own} and a norm check at the server": (self.method, Clipped(), True),
            "if it had sent its honest update": (self.method, None, False),
        }
        found = {label: self._uploads(client, t, share, *v) for label, v in variants.items()}
        x, measured = found[f"cap = {own}"]
        says = (
            f"{client} with {100 * share:.0f} % of its cohort's weight uploads -((1.3 - p) / p) w_t in round {t}, "
            f"{measured['upload']:.0f} times as long as its honest update. Its estimate of the foundation model is the "
            "next model, corrected for the range of a_t. Errors before and after that correction: "
        )
        says += "; ".join(
            f"{label}: {m['as_sent']:.3g} and {m['error']:.3g} (a_t / U = {m['pull']:.3g})"
            for label, (_, m) in found.items()
        )
        says += ". We assume that the client knows its weight p."
        detail = {"client": client, "round": t, "share": share, "variants": {k: m for k, (_, m) in found.items()}}
        return self._finding(name, ACTIVE, x, says, detail)

    def _when(self) -> tuple[ClientId, int, float] | None:
        """A client of median weight, its second or a later round, and its fraction of that round's weight."""
        known: set[ClientId] = set()
        for turn in self.rounds.turns:
            weights = {s.client: s.value.weight for s in turn.replies}
            able = [c for c in weights if c in known and self.rounds.receives_model({c}, turn.round)]
            if able:
                client = sorted(able, key=lambda c: (weights[c], c))[len(able) // 2]
                return client, turn.round, weights[client] / sum(weights.values())
            known |= set(weights)
        return None

    def _uploads(
        self, client: ClientId, t: int, share: float, method: FedBaF, check: Aggregator | None, turn_around: bool
    ) -> tuple[Array, dict[str, float]]:
        """The client's estimate after its update in round t, and figures about the estimate. The function repeats the
        server's steps on the run's replies.
        """
        turns = [turn for turn in self.rounds.turns if turn.round <= t]
        w, names = self.rounds.model(turns[-1].before), self.rounds.server.names
        honest = next(s for s in turns[-1].replies if s.client == client)
        sent = replace(honest, value=reverse_mean(honest.value, w, share, names)) if turn_around else honest
        turns[-1] = replace(turns[-1], replies=[sent if s is honest else s for s in turns[-1].replies])
        after, pulled = self.rounds.server.repeat_steps(self.replay.run, method, turns, self.rounds.first, check)

        # The client assumes that all other clients send the same update as its own honest one, and that a norm check
        # shortens its reversed update to the norm of this honest update. If it is alone in the cohort, a norm check
        # does not shorten its update.
        base, pull, own = BaseStep(self.replay.population, method, self.seed), Pull(method, names), self.rounds.start
        for turn in turns[:-1]:
            if any(s.client == client for s in turn.replies):
                mean, own = base.step(turn, own, {client})
                pull(mean, self.rounds.model(turn.before), turn.round)
        long = sent.value.delta.norm() / honest.value.delta.norm()
        median = float(np.median([long] + [1.0] * (len(turns[-1].replies) - 1)))
        upload = sent.value.delta * (1.0 if check is None else min(1.0, median / long))
        guess = replace(sent, value=replace(sent.value, delta=share * upload + (1 - share) * honest.value.delta))
        mean, _ = base.step(replace(turns[-1], replies=[guess]), own, {client})
        l_t = pull(mean, w, t)[1]
        v, truth = self.target.of(self.rounds.model(after)), self.target.truth
        x = extraction.one_round(self.target.of(mean), v, *_range(method, l_t)) if l_t else v.astype(np.float64)
        return x, {
            "error": extraction.relative_error(x, truth),
            "as_sent": extraction.relative_error(v, truth),
            "pull": pulled,
            "upload": long,
        }

    # --- findings -----------------------------------------------------------------------------------------------------
    def _sentence(self, x: Array, lines: Lines, how: str) -> str:
        error, n = extraction.relative_error(x, self.target.truth), len(lines.rounds)
        exact = ": exact to rounding, for any alpha" if error < EXACT else ""
        return f"it to a relative error of {error:.3g} from {n} round{'' if n == 1 else 's'} ({how}){exact}."

    def _finding(
        self,
        name: str,
        question: str,
        x: Array,
        says: str,
        detail: dict[str, Any],
        low: float | None = None,
        high: float | None = None,
    ) -> Finding:
        error = extraction.relative_error(x, self.target.truth)
        able = self.fidelity.ability(self.target.into(self.frame, x))
        by_tensor = {
            n: extraction.relative_error(x[g], self.target.truth[g])
            for n, g in zip(self.target.names, self.target.groups, strict=True)
        }
        detail |= {
            "by_tensor": by_tensor,
            "ability": {"recovered": able._asdict(), "foundation": self.true._asdict(), "start": self.start._asdict()},
        }
        says += f" The features of the computed model have a mean cosine of {able.cosine:.3f} with the true model's"
        for key, what in (("probe", "a linear classifier on them is correct on"), ("accuracy", "it is correct on")):
            got, true, start = (getattr(a, key) for a in (able, self.true, self.start))
            if got is not None:
                says += f"; {what} {100 * got:.1f} % of the run's test rows (foundation model {100 * true:.1f} %, "
                says += f"start weights {100 * start:.1f} %)"
        if able.perplexity is not None and self.true.perplexity is not None:
            says += f"; its perplexity is {able.perplexity:.4g} (foundation model {self.true.perplexity:.4g})"
        return Finding(name, question, error, low, high, LINE, disclosure_rule(able.cosine), f"{says}.", False, detail)


def sums(everyone: Finding) -> Finding:
    """The finding about all clients if only sums of updates are visible; a sum is enough to compute w'."""
    says = "No. The attack computed nothing even from single updates."
    if everyone.estimate is not None:
        says = "No. All clients together know the sum of their updates, from which they compute the aggregate before "
        says += f"mixing. So the relative error is the same {everyone.estimate:.3g}."
    return replace(everyone, name="extraction.hidden_sums", question=SUMS, says=says, detail={})


class Clipped(Aggregator):
    """A server's norm check: clips every update to the median norm of its round."""

    def reduce(self, fed: Federation, updates: Iterator[Update]) -> Params:
        received = list(updates)
        norms = [u.delta.norm() for u in received]
        most, mean = float(np.median(norms)), RunningMean()
        for update, norm in zip(received, norms, strict=True):
            mean.add(update.weight, update.delta * min(1.0, most / norm) if norm else update.delta)
        return mean.result()


def reverse_mean(update: Update, w: Params, share: float, names: Collection[str]) -> Update:
    """A client's update that reverses the direction of the mean. The client has the fraction ``share`` of the weight.

    The update leaves running statistics unchanged.
    """
    joined = "y/" if any(n.startswith("y/") for n in update.delta) else ""  # scaffold sends a second vector in addition
    away = {joined + n: torch.from_numpy(extraction.turned_around(w[n].numpy(), share)) - w[n] for n in names}
    return replace(update, delta=update.delta.replace(away))


def disclosure_rule(cosine: float) -> VerdictRule:
    """The rule for whether the true model is disclosed, either by its weights or by its features.

    The estimate is the relative error of the weights, and ``cosine`` is the mean cosine of the features.
    """
    name = "cosine of the features"
    leaks, holds = ("estimate < bound", f"{name} > {ALIKE}"), (f"estimate > {FAR}", f"{name} < {UNLIKE}")
    return VerdictRule(leaks, holds).with_numbers({name: cosine})
