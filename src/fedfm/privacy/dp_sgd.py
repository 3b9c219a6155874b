"""DP-SGD at one client: the noise multiplier of its steps, its secret coins, and its noise.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. Deep Learning with Differential Privacy. CCS 2016.
arXiv:1607.00133, Algorithm 1. In each step, a separate coin for every row includes the row with probability q (Poisson
sampling), so the number of rows in a batch is random, and may be 0. Neighbours differ by one row. The number of rows
n_k is public, so a missing row counts as a row that adds nothing to any sum. Noisy floats are rounded to a lattice
(Mironov 2012).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedfm.core.client import Client
from fedfm.errors import E_REFUSED, ClientFault, RowsChanged
from fedfm.privacy.composition import Releases, epsilon_of, noise_multiplier_for
from fedfm.privacy.noise import cover, digest, stream

_COMPARED = 64  # number of leading entries by which noisy sums are compared; their noise depends on the complete sum
MEMORY = "dp_sgd"  # beginning of the names in client.write_once, and name of the client's secret


@dataclass(frozen=True)
class DescentPlan:
    """The settings of DP-SGD, fixed by an experiment before any row is read.

    Attributes:
        clip_norm: C, bound on the L2 norm of one row's gradient over all trainable tensors together.
        delta: delta of the guarantee (epsilon, delta).
        rounds: largest number of rounds in which a client trains.
        target_epsilon: the largest epsilon of a client; None if ``noise_multiplier`` is given.
        noise_multiplier: z, the noise's standard deviation divided by C; None if each client computes its own z.
    """

    clip_norm: float
    delta: float
    rounds: int
    target_epsilon: float | None = None
    noise_multiplier: float | None = None

    def releases(self, n: int, batch_size: int, steps: int) -> Releases:
        """The releases of a client with n rows, over all rounds.

        Args:
            batch_size: B, the expected size of a batch.
            steps: number of steps in one round.

        Raises:
            InputError: no noise multiplier below 10,000 is enough for the target.
        """
        q, times = min(batch_size / n, 1.0), self.rounds * steps
        z = self.noise_multiplier or 0.0
        if self.target_epsilon is not None and times:
            z = noise_multiplier_for(self.target_epsilon, self.delta, times, q)
        return Releases(z, times, q)

    def epsilon(self, releases: Releases) -> float:
        """Epsilon of these releases, an upper bound."""
        return epsilon_of([releases], self.delta)


class PrivateSteps:
    """A client's steps under a plan. Each step is taken only once, from a single start.

    The first training of a round records the round's place among the steps of the run, and its start: a digest of
    everything that determines a gradient, rows and seed included. The coins depend on the start alone. The noise of a
    step also depends on the sum that it covers, so two sums that differ in a bit share no noise. A repeated round takes
    the same steps with the same noise. Another start of a recorded round is refused, and so is a round before the last
    recorded one. Both would release further sums with other noise, which would not be accounted.

    :attr:`Client.write_once` keeps the records. They have no versions, so neither a resume, nor a repeated message, nor
    the order of rounds undoes them. The client's memory has versions, and only stores where the search for the round's
    place begins.

    Args:
        steps: number of steps in one round.
    """

    def __init__(self, plan: DescentPlan, client: Client, n: int, batch_size: int, steps: int) -> None:
        self._client, self._n, self._steps, self._clip = client, n, steps, plan.clip_norm
        known = client.memory.get(MEMORY)
        if known is None:
            releases = plan.releases(n, batch_size, steps)
            budget = {"of": releases.times, "z": releases.noise_multiplier, "q": releases.rate, "n": n}
            known = json.loads(client.write_once(f"{MEMORY}-budget", json.dumps(budget).encode()))
        self._known = dict(known)
        self._key = client.secret(MEMORY)
        self._place, self._start = 0, ""
        self._released = hashlib.sha256()

    @property
    def sigma(self) -> float:
        """Standard deviation of each number of the noise on a step's sum."""
        return float(self._known["z"]) * self._clip

    @property
    def expected_size(self) -> float:
        """The expected size q n_k of a batch, by which a step divides its sum."""
        return float(self._known["q"]) * self._n

    @property
    def includes_first_step(self) -> bool:
        """Whether this training has the client's first step."""
        return not self._place

    def begin(self, start: str) -> None:
        """Spend one round's steps. ``start`` represents everything that the steps depend on, except the secret.

        Raises:
            ClientFault: E_REFUSED: all steps are spent, this round began from another start, a later round has begun,
                or the number of rows differs from the first round's, for which the noise was chosen.
        """
        if self._known.get("n", self._n) != self._n:
            raise RowsChanged(
                "DP-SGD: the number of training rows changed during the run, and the noise was chosen for the "
                "number at the start; start a new run"
            )
        t, of = self._client.round, self._known["of"]
        place: int = self._known.get("place", 0)
        terms = repr((t, of, self._known["z"], self._known["q"], self._clip, self._n, self._steps))
        self._start = digest(start, terms)
        own = {"round": t, "start": self._start, "steps": self._steps}
        while place + self._steps <= of:
            found = json.loads(self._client.write_once(f"{MEMORY}-place-{place}", json.dumps(own).encode()))
            if found == own:
                self._place = place
                self._client.memory[MEMORY] = self._known | {"place": place}
                return
            if found["round"] == t:
                raise RowsChanged(
                    f"DP-SGD: round {t} was trained from another start: other weights, rows or settings; to train it "
                    "again would spend privacy without accounting. If rows were changed, put them back or start a new "
                    "run"
                )
            if found["round"] > t:
                raise _refusal(f"round {t} comes after round {found['round']}, which was trained already")
            place += found["steps"]  # an entry of an earlier round
        raise _refusal(f"{place} of {of} private steps are taken; {self._steps} more would exceed this number")

    def batch(self, step: int) -> NDArray[np.int64]:
        """Indexes of the rows of this round's step 0, 1, ...: each row by its own coin."""
        if self._known["q"] >= 1:
            return np.arange(self._n)
        words = np.frombuffer(stream(self._key, f"coins/{self._start}/{step}", 8 * self._n), dtype="<u8")
        return np.flatnonzero((words >> np.uint64(11)) < self._known["q"] * 2.0**53)

    def noisy(self, total: NDArray[np.float64], step: int) -> NDArray[np.float64]:
        """The step's sum (P,) with its noise."""
        if not self.sigma:
            return total
        released = cover(self._key, f"noise/{self._start}/{step}", total, self.sigma)
        self._released.update(released[:_COMPARED].tobytes())
        return released

    def end(self) -> None:
        """Record the round's releases; call it before any of them leaves the client.

        Raises:
            ClientFault: E_REFUSED: a repetition from the same start gave other sums, which would be a further release.
        """
        released = self._released.hexdigest().encode()
        if self._client.write_once(f"{MEMORY}-released-{self._place}", released) != released:
            raise RowsChanged(
                f"DP-SGD: round {self._client.round} was trained before, and its repetition did not give the same "
                "bits, perhaps on another processor or a GPU; a second answer would spend privacy that is not accounted"
            )


def _refusal(why: str) -> ClientFault:
    return ClientFault(E_REFUSED, f"DP-SGD: {why}")
