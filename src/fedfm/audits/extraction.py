"""Whether a foundation model that the server keeps can be computed from the models that it sends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedfm import seeds
from fedfm.aggregation.base import Aggregator
from fedfm.audits.audit import Audit
from fedfm.audits.fedbaf_coalition import BaseStep, Lines, Pull, Rounds
from fedfm.audits.fidelity import Ability, Fidelity
from fedfm.audits.finding import Finding, Verdict, nothing
from fedfm.audits.inference import extraction
from fedfm.audits.inference.extraction import NoIntersectionError
from fedfm.audits.replay import Replay
from fedfm.core.client import ClientId, Update
from fedfm.core.federation import Federation
from fedfm.linalg.params import Params
from fedfm.linalg.running_mean import RunningMean
from fedfm.linalg.threads import one_thread, torch_threads
from fedfm.methods.fedbaf.fedbaf import LOG_RANGE, FedBaF
from fedfm.privacy.gaussian import sigma_for
from fedfm.runtime.run_directory import Run

Array = NDArray[Any]
LINE = 0.1  # relative error below which the model counts as disclosed
ALIKE = 0.9  # cosine of its features with the true ones from which on its function does, whatever the error
FAR, UNLIKE = 0.5, 0.5  # it counts as kept from this error on, if the cosine is below that
EXACT = 1e-3  # relative error that rounding explains
SHARES = (0.5, 0.2, 0.1)
DRAWS = 5  # coalitions of a share
ALONE = 10  # clients of which each is attacked with
GUARANTEE = (1.0, 1e-5)  # epsilon and delta at which noise drawn once is stated

ALL = "Can all clients together compute the server's foundation model?"
SUMS = "Does it help that updates are hidden in their sum?"
ONE = "Can one client that only watches compute it?"
ACTIVE = "Can one client that uploads a turned-around update?"


class Extraction(Audit):
    """Relative error of the foundation model as coalitions of clients compute it, and what they could do with it."""

    methods: ClassVar[tuple[str, ...]] = ("fedbaf",)
    replies: ClassVar[bool] = False

    def unfit(self, run: Run) -> str | None:
        method, rounds = run.experiment.method, run.manifest["result"]["rounds"]
        if not rounds or not method.psi:
            return f"with {'psi = 0' if rounds else 'no round'} no foundation model was mixed in"
        return None

    def watch(self, run: Run) -> Rounds:
        experiment, manifest = run.experiment, run.manifest
        return Rounds(
            experiment.method,
            clients=len(manifest["clients"]),
            rounds=manifest["result"]["rounds"],
            trainable=int(manifest["model"]["trainable"]),
            seed=experiment.run.seed,
            evaluate_every=experiment.run.evaluate_every,
            aggregator=experiment.aggregation,
        )

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        # Long vectors, small matrices: threads that wait for each other cost many times what they compute.
        with torch_threads(1), one_thread():
            return self._findings(replay, notice)

    def _findings(self, replay: Replay, notice: Callable[[str], None]) -> list[Finding]:
        rounds = replay.watched["extraction"]
        assert isinstance(rounds, Rounds)  # noqa: S101 - what watch() made
        if not any(r["pull"] for r in rounds.curve):
            return [nothing("extraction.all_colluding", ALL, "Nothing was mixed in: the model never moved.")]
        attack = _Attack(replay, rounds)
        found = [everyone := attack.everyone(), sums(everyone)]
        notice("coalitions of some clients")
        found += [f for share in SHARES if (f := attack.share(share)) is not None]
        found.append(attack.alone())
        notice("one active client")
        return [*found, attack.active()]


def recover(lines: Lines, method: FedBaF, groups: extraction.Groups, *, exact: bool) -> tuple[Array, str]:
    """(estimate of w_pre, how) from what a coalition knows, by what is best against the run's variant.

    The attacker knows method, psi and variant; alpha it does not know.

    Args:
        exact: u is w' itself, not an estimate of it.

    Raises:
        NoIntersectionError: there is no line.
    """
    u, v, guess = lines.u, lines.v, lines.guess
    if not len(u):
        raise NoIntersectionError("no round in which anything was mixed in")
    least, most = LOG_RANGE if method.harden == "log_uniform" else (1.0, 2.0)
    low, high = extraction.place(least * guess, most * guess)
    # A part of the cohort cannot tell which half a round mixed; with alpha by coordinate its scalars err no more than
    # intervals around a wrong aggregate.
    if method.harden == "log_uniform" or (method.harden == "per_coordinate" if exact else method.harden == "half"):
        return extraction.coordinatewise(u, v, low, high, "log" if method.harden == "log_uniform" else "uniform"), (
            "intervals of every coordinate"
        )
    if not exact:
        if method.harden != "per_tensor":
            return extraction.alternating(u, v, guess)[0], "alternating estimate"
        x = np.empty(u.shape[1])
        for g in groups:
            x[g] = extraction.alternating(u[:, g], v[:, g], guess)[0]
        return x, "alternating estimate of every tensor"
    try:
        if method.harden == "half":
            return extraction.intersection(u, v, groups).x, "intersection of lines"
        if method.harden not in ("per_tensor", "noise_afresh"):
            return extraction.intersection(u, v).x, "intersection of lines"
    except NoIntersectionError:
        pass
    if method.harden in ("per_tensor", "half"):
        return extraction.tensorwise(u, v, groups, low, high)[0], "intersection of every tensor's lines"
    x, met = extraction.tensorwise(u, v, [slice(None)], low, high)
    return x, "nearest point of lines held to their range" if met else "range of one line"


class _Attack:
    """All of it against one run."""

    def __init__(self, replay: Replay, rounds: Rounds) -> None:
        self.replay, self.rounds, self.method, self.target = replay, rounds, rounds.method, rounds.target
        self.seed = replay.run.experiment.run.seed
        self.clients = tuple(replay.population.clients)
        self.frame = rounds.last  # has what does not mix, and every client has it
        true = self.target.into(self.frame, self.target.truth)
        self.fidelity = Fidelity(replay.population, true, whole=self.target.whole, seed=self.seed)
        self.true = self.fidelity.ability(true)
        self.start = self.fidelity.ability(rounds.first)

    # --- coalitions ---------------------------------------------------------------------------------------------------
    def everyone(self) -> Finding:
        """All clients, who know w' itself."""
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
            # All that is sent is computed from one w_pre + sigma N, and sigma from the starting weights alone.
            w_0 = self.rounds.first.only(self.rounds.server.names)
            sigma = self.method.noise * w_0.norm() / math.sqrt(sum(t.numel() for t in w_0.values()))
            detail["hidden_change"] = change = sigma / sigma_for(*GUARANTEE)
            says += (
                f" The noise hides, with (epsilon, delta) = {GUARANTEE} and for any number of rounds, which of two "
                f"foundation models it was that are no further apart than {change:.3g}, "
                f"{change / float(np.linalg.norm(self.target.truth)):.2g} of this one's length."
            )
        return self._finding(name, ALL, x, says, detail)

    def share(self, share: float) -> Finding | None:
        """Random coalitions of a share of the clients; None where that is nobody, or one client alone."""
        size = math.floor(share * len(self.clients) + 1e-9)
        if size < 2:
            return None
        name = f"extraction.colluding_{100 * share:.0f}"
        rng = seeds.generator(self.seed, "audit", "extraction", size)
        drawn = [tuple(sorted(rng.choice(self.clients, size, replace=False).tolist())) for _ in range(DRAWS)]
        question = f"Can {100 * share:.0f} % of the clients together compute it?"
        return self._some(name, question, drawn, f"{size} of {len(self.clients)} clients together")

    def alone(self) -> Finding:
        """One client that watches, for several clients."""
        took = {c: sum(any(s.client == c for s in turn.seen) for turn in self.rounds.turns) for c in self.clients}
        chosen = sorted(self.clients, key=lambda c: (-took[c], c))[:ALONE]
        return self._some("extraction.one_client", ONE, [(c,) for c in sorted(chosen)], "One client that only watches")

    def _some(self, name: str, question: str, drawn: Sequence[tuple[ClientId, ...]], who: str) -> Finding:
        found = []
        for members in drawn:
            lines = self.rounds.lines(members)
            try:
                x, how = recover(lines, self.method, self.target.groups, exact=lines.exact)
            except NoIntersectionError:
                continue
            how += ", the aggregates read off SCAFFOLD's control variates" if lines.controls else ""
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
        """One upload turned around: with both caps, and with a norm check at the server."""
        name, chosen = "extraction.active_client", self._when()
        if self.method.harden == "first_round":
            says = "The one round that mixes has a_t = psi U, whatever is uploaded, and no later one meets the model."
            return nothing(name, ACTIVE, says)
        if chosen is None:
            return nothing(name, ACTIVE, "No client took part in two rounds and saw the model after the second.")
        client, t, share = chosen
        own, other = self.method.cap, "none" if self.method.cap == "reference" else "reference"
        variants: dict[str, tuple[FedBaF, Aggregator | None, bool]] = {
            f"cap = {own}": (self.method, None, True),
            f"cap = {other}": (replace(self.method, cap=other), None, True),
            f"cap = {own} and a norm check at the server": (self.method, Clipped(), True),
            "had it only watched this round": (self.method, None, False),
        }
        found = {label: self._uploads(client, t, share, *v) for label, v in variants.items()}
        x, measured = found[f"cap = {own}"]
        says = (
            f"{client} with {100 * share:.0f} % of its cohort's weight uploads -((1.3 - p) / p) w_t in round {t}, "
            f"{measured['upload']:.0f} times as long as its honest update, and takes the next model for the foundation "
            f"model, corrected for the range of a_t. Errors before and after that correction: "
        )
        says += "; ".join(
            f"{label}: {m['as_sent']:.3g} and {m['error']:.3g} (a_t / U = {m['pull']:.3g})"
            for label, (_, m) in found.items()
        )
        says += ". The client is taken to know its weight p."
        detail = {"client": client, "round": t, "share": share, "variants": {k: m for k, (_, m) in found.items()}}
        return self._finding(name, ACTIVE, x, says, detail)

    def _when(self) -> tuple[ClientId, int, float] | None:
        """(client, round, its share of the weight): a typical client, in the first round after one it knows."""
        known: set[ClientId] = set()
        for turn in self.rounds.turns:
            weights = {s.client: s.value.weight for s in turn.seen}
            able = [c for c in weights if c in known and self.rounds.sees({c}, turn.round)]
            if able:
                client = sorted(able, key=lambda c: (weights[c], c))[len(able) // 2]
                return client, turn.round, weights[client] / sum(weights.values())
            known |= set(weights)
        return None

    def _uploads(
        self, client: ClientId, t: int, share: float, method: FedBaF, check: Aggregator | None, turn_around: bool
    ) -> tuple[Array, dict[str, float]]:
        """(its estimate, figures) after its upload of round t: the server's steps once more, on clients' replies."""
        turns = [turn for turn in self.rounds.turns if turn.round <= t]
        w, names = self.rounds.model(turns[-1].before), self.rounds.server.names
        honest = next(s for s in turns[-1].seen if s.client == client)
        sent = replace(honest, value=turned(honest.value, w, share, names)) if turn_around else honest
        turns[-1] = replace(turns[-1], seen=[sent if s is honest else s for s in turns[-1].seen])
        after, pulled = self.rounds.server.again(self.replay.run, method, turns, self.rounds.first, check)

        # What the client makes of it: the others are taken to do what it would have done, and a check to shorten its
        # update to the median length, in a large cohort that of an honest one, in a cohort of one its own.
        base, pull, own = BaseStep(self.replay.population, method, self.seed), Pull(method, names), self.rounds.start
        for turn in turns[:-1]:
            if any(s.client == client for s in turn.seen):
                mean, own = base.step(turn, own, {client})
                pull(mean, self.rounds.model(turn.before), turn.round)
        long = sent.value.delta.norm() / honest.value.delta.norm()
        median = float(np.median([long] + [1.0] * (len(turns[-1].seen) - 1)))
        upload = sent.value.delta * (1.0 if check is None else min(1.0, median / long))
        guess = replace(sent, value=replace(sent.value, delta=share * upload + (1 - share) * honest.value.delta))
        mean, _ = base.step(replace(turns[-1], seen=[guess]), own, {client})
        l_t = pull(mean, w, t)[1]
        v, truth = self.target.of(self.rounds.model(after)), self.target.truth
        x = v.astype(np.float64)
        if l_t:
            least, most = LOG_RANGE if method.harden == "log_uniform" else (1.0, 2.0)
            x = extraction.one_round(self.target.of(mean), v, *extraction.place(least * l_t, most * l_t))
        return x, {
            "error": extraction.relative_error(x, truth),
            "as_sent": extraction.relative_error(v, truth),
            "pull": pulled,
            "upload": long,
        }

    # --- how it is said -----------------------------------------------------------------------------------------------
    def _sentence(self, x: Array, lines: Lines, how: str) -> str:
        error, n = extraction.relative_error(x, self.target.truth), len(lines.rounds)
        exact = ": exact to rounding, whatever alpha was drawn" if error < EXACT else ""
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
        error, able = extraction.relative_error(x, self.target.truth), self._able(x)
        by_tensor = {
            n: extraction.relative_error(x[g], self.target.truth[g])
            for n, g in zip(self.target.names, self.target.groups, strict=True)
        }
        detail |= {
            "by_tensor": by_tensor,
            "ability": {"recovered": able._asdict(), "foundation": self.true._asdict(), "start": self.start._asdict()},
        }
        told = f"{says} {self._says_ability(able)}"
        return Finding(name, question, error, low, high, LINE, verdict(error, able.cosine), told, False, detail)

    def _able(self, x: Array) -> Ability:
        return self.fidelity.ability(self.target.into(self.frame, x))

    def _says_ability(self, able: Ability) -> str:
        said = f"The features of what they compute have a mean cosine of {able.cosine:.3f} with the true model's"
        for key, what in (
            ("probe", "a linear classifier on them is right on"),
            ("accuracy", "it is right on"),
        ):
            got, true, start = (getattr(a, key) for a in (able, self.true, self.start))
            if got is not None:
                said += f"; {what} {100 * got:.1f} % of the run's test rows (foundation model {100 * true:.1f} %, "
                said += f"starting weights {100 * start:.1f} %)"
        if able.perplexity is not None and self.true.perplexity is not None:
            said += f"; its perplexity is {able.perplexity:.4g} (foundation model {self.true.perplexity:.4g})"
        return said + "."


def sums(everyone: Finding) -> Finding:
    """The finding of all clients where updates are hidden in their sum: w' needs no more than that."""
    same = (
        "nothing was computed"
        if everyone.estimate is None
        else f"the relative error is the same {everyone.estimate:.3g}"
    )
    says = f"No. All clients together know their own sum, and w' takes no more: {same}."
    return replace(everyone, name="extraction.hidden_sums", question=SUMS, says=says, detail={})


class Clipped(Aggregator):
    """A server's norm check: no update counts for more than the median length of its round."""

    def combined(self, fed: Federation, updates: Iterator[Update]) -> Params:
        came = list(updates)
        norms = [u.delta.norm() for u in came]
        most, mean = float(np.median(norms)), RunningMean()
        for update, norm in zip(came, norms, strict=True):
            mean.add(update.weight, update.delta * min(1.0, most / norm) if norm else update.delta)
        return mean.result()


def turned(update: Update, w: Params, share: float, names: Collection[str]) -> Update:
    """The update of a client of this share that turns the mean around; running statistics stay as they are."""
    joined = "y/" if any(n.startswith("y/") for n in update.delta) else ""  # scaffold sends a second vector along
    away = {joined + n: torch.from_numpy(extraction.turned_around(w[n].numpy(), share)) - w[n] for n in names}
    return replace(update, delta=update.delta.replace(away))


def verdict(error: float, cosine: float) -> Verdict:
    """Whether a computed model discloses the true one, by its weights or by what it can do."""
    if error < LINE or cosine > ALIKE:
        return "leaks"
    return "holds" if error > FAR and cosine < UNLIKE else "inconclusive"
