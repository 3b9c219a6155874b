"""Client-level privacy by noise that is correlated over rounds; :mod:`fedfm.privacy.correlated` has the mathematics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedfm.aggregation._client_level import CentralGaussian
from fedfm.aggregation._lattice import Steps
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.errors import RunError
from fedfm.privacy import noise
from fedfm.privacy.cohorts import rotation
from fedfm.privacy.composition import Releases, epsilon_of
from fedfm.privacy.correlated import Strategy, strategy

_GROUPS, _SUMS = "CorrelatedGaussian/groups", "CorrelatedGaussian/sums"  # keys of the server's memory


@dataclass(frozen=True)
class CorrelatedGaussian(CentralGaussian):
    """The server adds C^-1 Z to the sums of the rounds. A client takes part once every b rounds, in a rotation.

    The entries of row j of Z have the standard deviation z clip_norm. The server's secret, the round j and the sums of
    all rounds up to j determine the row, so a resumed run draws the same row again. If a round is repeated with another
    sum, this round and all later ones get new rows. With the old rows, the difference of the two results would disclose
    the difference of the sums. Round t draws t random vectors.

    Attributes:
        rounds: T, number of rounds for which the strategy is made.
        period: b, number of rounds within which every client takes part once.
    """

    rounds: int = 1
    period: int = 1

    name: ClassVar[str] = "Gaussian, correlated over rounds, by the server"

    @property
    def strategy(self) -> Strategy:
        """The matrix C."""
        return strategy(self.rounds, self.period)

    @property
    def fraction(self) -> float:
        return 1 / self.period

    def cohort(self, fed: Federation) -> Sequence[ClientId]:
        """The round's group.

        Raises:
            RunError: a group has no client.
        """
        if self.period > len(fed.clients):
            raise RunError(f"method.fraction: {len(fed.clients)} clients cannot form {self.period} groups")
        groups = rotation(fed.seed, fed.clients, self.period, fed.memory.get(_GROUPS, {}))
        if groups != fed.memory.get(_GROUPS):
            fed.memory[_GROUPS] = groups
        return [name for name in fed.clients if groups[name] == (fed.round - 1) % self.period]

    def _noisy(self, fed: Federation, total: Steps, purpose: str, asked: float) -> Steps:
        t, known = fed.round, list(fed.memory.get(_SUMS, ()))
        if len(known) != t - 1:
            raise RunError(f"round {t}: the server's memory of the noise of earlier rounds is lost")
        fed.memory[_SUMS] = known = [
            *known,
            noise.digest(total, *known[-1:]),
        ]  # digest of this sum and of all before it
        weights = self.strategy.inverse()[t - 1 :: -1]  # weights of rounds 1, ..., t
        key, scale = fed.secret("noise"), self.noise_multiplier * self.clip_norm / self.step
        found = np.empty(len(total), np.int64)
        for at in range(0, len(total), noise.BLOCK):
            part = found[at : at + noise.BLOCK]
            drawn = np.zeros(part.shape)
            for j, (weight, sums) in enumerate(zip(weights, known, strict=True), 1):
                row = f"client level/correlated/{j}/{scale!r}/{sums}/{at}"
                drawn += weight * noise.gaussian(key, row, part.shape)
            part[:] = np.rint(scale * drawn)
        return total + found

    def epsilon_after(self, rounds: int) -> float:
        return epsilon_of([Releases(self.noise_multiplier / self.sensitivity(rounds))], self.delta)

    def sensitivity(self, rounds: int) -> float:
        """As in :class:`CentralGaussian`. Each round beyond T stands for a round that was released again.

        From a repeated round on, the run has other sums and other rows of noise. So the repetition costs at most as
        much as a second run.
        """
        again = max(rounds - self.rounds, 0)
        return self.strategy.sensitivity(min(rounds, self.rounds)) * math.sqrt(1 + again)

    @property
    def noise_of_one_answer(self) -> float:
        """Independent releases with this noise multiplier spend at least the epsilon that a client's answers spend."""
        return self.noise_multiplier / self.strategy.of_one_answer()

    @property
    def _taking_part(self) -> str:
        bands = len(self.strategy.coefficients)
        return (
            f"each client in one of {self.period} rounds, in a rotation, with a banded strategy of {bands} bands; "
            "the sensitivity is that of all sums multiplied by the strategy"
        )
