"""The guarantee of DP-SGD at one client: how much noise its steps need, and its secret coins and noise.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. Deep Learning with Differential Privacy. CCS 2016.
arXiv:1607.00133, Algorithm 1. Each step takes every row by a coin of its own with probability q (Poisson sampling), so
the number of rows in a batch is random, and may be 0. Neighbours differ by one row; the number of rows n_k is public:
a missing row counts as one that adds nothing to any sum. Floats that carry noise lie on a lattice (Mironov 2012).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedfm.core.client import Client
from fedfm.errors import E_REFUSED, ClientFault
from fedfm.privacy.composition import Releases, epsilon_of, noise_multiplier_for
from fedfm.privacy.noise import gaussian, on_grid, stream

MEMORY = "dp_sgd"  # key in client.memory, and name of the client's secret


@dataclass(frozen=True)
class DescentPlan:
    """DP-SGD as an experiment fixes it before any row is seen.

    Attributes:
        clip_norm: C, bound on the L2 norm of one row's gradient over all trainable tensors together.
        delta: of (epsilon, delta).
        rounds: in which a client trains at most.
        target_epsilon: what each client spends at most; None: ``noise_multiplier`` is given.
        noise_multiplier: z, the noise's standard deviation over C; None: each client finds its own.
    """

    clip_norm: float
    delta: float
    rounds: int
    target_epsilon: float | None = None
    noise_multiplier: float | None = None

    def releases(self, n: int, batch_size: int, steps: int) -> Releases:
        """What a client with n rows releases, all rounds together.

        Args:
            batch_size: B, the expected size of a batch.
            steps: in one round.

        Raises:
            InputError: no noise multiplier below 10,000 is enough for the target.
        """
        q, times = min(batch_size / n, 1.0), self.rounds * steps
        z = self.noise_multiplier or 0.0
        if self.target_epsilon is not None and times:
            z = noise_multiplier_for(self.target_epsilon, self.delta, times, q)
        return Releases(z, times, q)

    def epsilon(self, releases: Releases) -> float:
        """What they spend, an upper bound."""
        return epsilon_of([releases], self.delta)


class PrivateSteps:
    """A client's steps under a plan: each is taken once, from one starting point.

    A step's place in the sequence names its coins and its noise. The first training from a place fixes its starting
    point on the disk. A repeated round therefore takes the same steps with the same noise, and no server gets a second
    sample: not by a restart, not by a wrong round, not by another model.

    Args:
        steps: in one round.
    """

    def __init__(self, plan: DescentPlan, client: Client, n: int, batch_size: int, steps: int) -> None:
        self._client, self._n, self._steps, self._clip = client, n, steps, plan.clip_norm
        known = client.memory.get(MEMORY)
        if known is None:
            releases = plan.releases(n, batch_size, steps)
            known = {"spent": 0, "of": releases.times, "z": releases.noise_multiplier, "q": releases.rate}
        self._known = dict(known)
        self._key = client.secret(MEMORY)
        self._place = 0

    @property
    def sigma(self) -> float:
        """Standard deviation of each number of the noise on a step's sum."""
        return float(self._known["z"]) * self._clip

    @property
    def expected(self) -> float:
        """The expected size q n_k of a batch, by which a step divides its sum."""
        return float(self._known["q"]) * self._n

    @property
    def unspent(self) -> bool:
        """Whether the client has taken no step yet."""
        return not self._known["spent"]

    def begin(self, start: bytes) -> None:
        """Spend one round's steps from this starting point, given by all that the steps depend on besides the rows.

        Raises:
            ClientFault: E_REFUSED, all steps are spent, or they were taken from another starting point before.
        """
        self._place = spent = self._known["spent"]
        if spent + self._steps > self._known["of"]:
            raise ClientFault(
                E_REFUSED, f"DP-SGD: {spent} of {self._known['of']} private steps are taken; {self._steps} more exceed"
            )
        digest = hashlib.sha256(start).digest()
        if self._client.first(f"{MEMORY}-{spent}", digest) != digest:
            raise ClientFault(
                E_REFUSED,
                f"DP-SGD: the private steps from {spent} on were taken from another model; a second time would spend "
                "privacy that is not accounted",
            )
        self._client.memory[MEMORY] = self._known | {"spent": spent + self._steps}

    def batch(self, step: int) -> NDArray[np.int64]:
        """Indexes of the rows of this round's step 0, 1, ...: each row by its own coin."""
        if self._known["q"] >= 1:
            return np.arange(self._n)
        words = np.frombuffer(stream(self._key, f"coins/{self._place + step}", 8 * self._n), dtype="<u8")
        return np.flatnonzero((words >> np.uint64(11)) < self._known["q"] * 2.0**53)

    def noisy(self, total: NDArray[np.float64], step: int) -> NDArray[np.float64]:
        """The step's sum (P,) with its noise."""
        if not self.sigma:
            return total
        noise = gaussian(self._key, f"noise/{self._place + step}", total.shape)
        return on_grid(total + self.sigma * noise, self.sigma)
