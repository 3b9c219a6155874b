"""Test the epsilon of DP-SGD: repeat a client's training with canary rows and new secrets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedfm import seeds
from fedfm.aggregation._record_level import DpSgd
from fedfm.audits.audit import Audit
from fedfm.audits.finding import Finding, absorb_rounding, nothing, twice
from fedfm.audits.inference import row_canaries
from fedfm.audits.inference.canaries import TOO_LONG
from fedfm.audits.inference.rates import Array
from fedfm.audits.inference.vectors import vector
from fedfm.audits.replay import Replay
from fedfm.audits.row_evidence import no_round
from fedfm.audits.stated_epsilon import CONFIDENCE, STRICT, finding_on_claim
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Batch, Rows
from fedfm.linalg.threads import torch_threads
from fedfm.models.families import Parts
from fedfm.models.model import Model
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import ModelSpec
from fedfm.privacy.composition import Releases
from fedfm.privacy.dp_sgd import DescentPlan
from fedfm.runtime import client_memory
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run
from fedfm.training import SGD, private
from fedfm.training.local_job import Job
from fedfm.training.scheduler import train_client

QUESTION = "Do the private steps disclose more about single rows than the stated epsilon allows?"
NO_ROW_NOISE = "the run adds no noise to the gradients of single rows (DP-SGD)"
DIMENSION = 4096  # length of the trained vector; the guarantee does not depend on it
CANARIES, TRAININGS = 1000, 20  # largest number of canaries, and of trainings
ENOUGH = 400  # the training is repeated until there are this many canaries
_MOST = 2e4  # largest number of steps of a training
_SATURATED = 1e30  # a logit that makes the softmax exactly 1


class RowCanaries(Audit):
    """Repeats the training of the client with the largest epsilon; the attacker sees each step.

    Number of rows, batch size, steps, noise and clipping are as in the run. The audit tests the mechanism: its coins,
    its clipping, its noise, and the accounting. ``row_norms`` tests the gradients of the run's own model.
    """

    replays: ClassVar[bool] = False
    takes: ClassVar[float] = 20.0

    def reads(self, run: Run) -> bool:
        return isinstance(run.experiment.aggregation.mechanism, DpSgd)

    def why_unread(self, run: Run) -> str:
        return NO_ROW_NOISE

    def unfit(self, run: Run) -> str | None:
        return no_round(run)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        run = replay.run
        mechanism = cast(DpSgd, run.experiment.aggregation.mechanism)  # reads() checks this
        client = costliest(replay.population, mechanism)
        if client is None:
            return [nothing("row_canaries", QUESTION, "No client has training rows.")]
        n, plan = len(replay.population.data(client).train), mechanism.plan
        claimed = plan.releases(n, mechanism.batch_size, mechanism.steps(n))
        if claimed.times > _MOST:
            why = f"A client takes {claimed.times} steps, more than {_MOST:.0f}, which is too many to repeat."
            return [nothing("row_canaries", QUESTION, why)]
        trainings = Trainings(plan, n, mechanism.batch_size, mechanism.steps(n), run.experiment.run.seed)
        with torch_threads(1):
            home = trainings.run(0)
            again = max(1, min(TRAININGS, -(-ENOUGH // trainings.canaries)))
            attacked = [trainings.run(i + 1) for i in range(again)]
        return [self._finding(run, trainings, home, attacked, claimed)]

    def _finding(
        self, run: Run, trainings: Trainings, home: CanaryTraining, attacked: list[CanaryTraining], claimed: Releases
    ) -> Finding:
        delta, stated, c = trainings.plan.delta, float(run.manifest["result"]["epsilon"]), trainings.plan.clip_norm
        k = trainings.canaries
        found = row_canaries.together(
            [row_canaries.read(t.steps, t.in_step[:k], home.in_step[:k], t.directions, c) for t in attacked]
        )
        rng = seeds.generator(run.experiment.run.seed, "audit", "strangers")
        levels = [(1 + level) / 2 for level in (CONFIDENCE, STRICT)]  # two bounds share each error level
        lows = [row_canaries.epsilon_bound(found, claimed, delta, level) for level in levels]
        counted = [row_canaries.bound_by_counts(found, claimed.rate, delta, level, rng) for level in levels]
        low, strict = (absorb_rounding(max(pair), stated) for pair in zip(lows, counted, strict=True))
        repeats = row_canaries.noise_repeats([t.noise(c) for t in (home, attacked[0])])
        coins = row_canaries.coins_differ([t.in_step for t in (home, *attacked)], claimed.rate)
        estimate = row_canaries.estimate(found, claimed, delta)
        low, strict, estimate = (math.inf, math.inf, math.inf) if repeats else (low, strict, estimate)
        # If the coins are not as the claim assumes, the claimed epsilon does not hold.
        strict = math.inf if coins else strict
        says = (
            f"{len(found.x)} canary rows, in {claimed.times} steps that each take a row with probability "
            f"{claimed.rate:.3g}, refute every epsilon below {low:.3g} at 95 % confidence if the noise is normal, and "
            f"below {counted[0]:.3g} without that assumption."
        )
        if repeats:
            says = "Two steps share their noise: the difference of their sums shows the rows."
        if coins:
            says += " Rows are not drawn into batches by independent coins, as the computation of epsilon assumes."
        detail = {"canaries": len(found.x), "steps": claimed.times, "rate": claimed.rate, "delta": delta}
        detail |= {"noise_multiplier": 1 / found.shift, "low_by_counts": counted[0], "independent_coins": not coins}
        figures, rule = (max(estimate, low), low, None), twice(strict, STRICT)
        return finding_on_claim("row_canaries", QUESTION, figures, stated, rule, says, detail)


def costliest(population: Partitioned, mechanism: DpSgd) -> str | None:
    """The client with the largest epsilon, and among equals the one with the most rows; None if no client has rows."""
    sizes = {client: n for client, n in population.sizes().items() if n}
    plan = mechanism.plan
    if plan.target_epsilon is None:
        spent = {n: plan.epsilon(plan.releases(n, mechanism.batch_size, mechanism.steps(n))) for n in {*sizes.values()}}
    else:
        spent = dict.fromkeys(sizes.values(), plan.target_epsilon)
    return max(sizes, key=lambda client: (spent[sizes[client]], sizes[client]), default=None)


class CanaryTraining:
    """The attacker's observations of one training.

    Attributes:
        steps: (T, d): the noisy sum of each step, computed from the model's change.
        in_step: (n, T): whether each row was in each step.
        directions: (K, d): directions of the canaries; the first K rows are the canaries.
    """

    def __init__(self, steps: Array, in_step: Array, directions: Array) -> None:
        self.steps, self.in_step, self.directions = steps, in_step, directions

    def noise(self, clip_norm: float) -> Array:
        """Noise (T, d) of the steps, which is their sums minus the canaries in them."""
        in_step = self.in_step[: len(self.directions)].T.astype(np.float64)
        return np.asarray(self.steps - clip_norm * (in_step @ self.directions))


class Trainings:
    """Private trainings of a client with n rows; the first rows are canaries. Each training has its own secret."""

    def __init__(self, plan: DescentPlan, n: int, batch_size: int, steps: int, seed: int) -> None:
        self.plan, self.canaries = plan, min(n, CANARIES)
        self._n, self._steps, self._seed = n, steps, seed
        epochs = steps // -(-n // batch_size)
        self._local = SGD(learning_rate=1 / plan.clip_norm, epochs=epochs, batch_size=batch_size)
        self._expected = min(batch_size, n)

    def run(self, number: int) -> CanaryTraining:
        """Train through all rounds, with new directions and a new secret."""
        rng = seeds.generator(self._seed, "audit", "row canaries", number)
        directions = rng.standard_normal((self.canaries, DIMENSION))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        model = _Directions(TOO_LONG * self.plan.clip_norm * directions)
        rows = Rows({"row": torch.arange(self._n)})
        data, secret = ClientData(lambda: rows, Rows, Rows), client_memory.entropy(32)
        firsts: dict[str, bytes] = {}
        client = Client(
            "canaries",
            private.hide_rows(data),
            model,
            {},
            seed=seeds.derive(self._seed, "audit", number),
            secret=lambda name: secret,
            write_once=firsts.setdefault,
            private=private.Descent(self.plan, data),
            trainer=train_client,
        )
        steps: list[Array] = []
        in_step = np.zeros((self._n, self.plan.rounds * self._steps), dtype=bool)
        w = model.params()
        last = vector(model.live().values())

        def after() -> None:
            nonlocal last
            now = vector(model.live().values())
            in_step[model.asked, len(steps)] = True
            steps.append((last - now) * self.plan.clip_norm * self._expected)
            last, model.asked = now, []

        for client.round in range(1, self.plan.rounds + 1):
            w = private.train_one(Job(client, w, self._local), after)
        return CanaryTraining(np.stack(steps), in_step, directions)


class _Directions(Model):
    """A model with a linear loss. Each canary has its own constant gradient, and other rows have gradient 0.

    Attributes:
        asked: rows whose loss was computed.
    """

    def __init__(self, gradients: Array) -> None:
        layer = nn.Linear(gradients.shape[1], 1, bias=False)
        nn.init.zeros_(layer.weight)
        parts = Parts(None, (), None, None, "")
        about = {"task": "classification", "classes": (), "fingerprint": "", "head": None}
        super().__init__(layer, spec=ModelSpec("canaries"), parts=parts, tools=Tools(), **about)  # type: ignore[arg-type]
        self._gradients = torch.from_numpy(gradients).float()
        self.asked: list[int] = []

    def logits(self, batch: Batch) -> Tensor:
        row = batch["row"]
        self.asked += row.tolist()
        x = torch.zeros(len(row), self._gradients.shape[1])
        ours = row < len(self._gradients)
        x[ours] = self._gradients[row[ours]]
        return self.module(x)  # type: ignore[no-any-return]

    def flat(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        # The wrong one of two classes has probability 1, so the derivative of the cross-entropy is 1.
        return torch.cat([logits + _SATURATED, torch.zeros_like(logits)], 1), torch.ones(len(logits), dtype=torch.int64)
