"""Client-level differential privacy of a mean: whether a client took part is hidden, with all of its rows.

McMahan, Ramage, Talwar, Zhang. Learning Differentially Private Recurrent Language Models. ICLR 2018, arXiv:1710.06963,
Algorithm 1 with a fixed denominator, equal weights and flat clipping. With ``distributed_gaussian`` each client adds
its share of the noise under secure aggregation: Kairouz, Liu, Steinke. The Distributed Discrete Gaussian Mechanism for
Federated Learning with Secure Aggregation. ICML 2021, arXiv:2102.06387.

A clipped update is rounded towards zero to a lattice, which cannot make it longer: the sensitivity of the sum is
``clip_norm`` exactly. Sums of lattice points are exact and the noise is rounded to the lattice, so the result is a
rounded Gaussian mechanism: no bit of a float tells more (Mironov. On Significance of the Least Significant Bits for
Differential Privacy. CCS 2012).
"""

from __future__ import annotations

import bisect
import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedfm.aggregation._secagg import MEMORY
from fedfm.aggregation._secagg_client import refused, sum_of
from fedfm.aggregation._secagg_keys import least_of
from fedfm.aggregation.base import Aggregator, Mechanism, Rule
from fedfm.aggregation.secure import Secure
from fedfm.core.client import Client, Update
from fedfm.core.federation import Federation
from fedfm.errors import E_NONFINITE, ClientFault, InputError, RunError
from fedfm.linalg.params import Layout, Params, in_dtype
from fedfm.privacy import noise
from fedfm.privacy.accountant import Accountant, Spent
from fedfm.privacy.composition import (
    Releases,
    epsilon_of,
    epsilon_of_concentrated,
    noise_multiplier_for,
    noise_multiplier_for_concentrated,
)
from fedfm.privacy.crypto.fixed_point import FixedPoint

Steps = NDArray[np.int64]  # a vector of R^P as multiples of the lattice's step

_LATTICE_BITS = 20  # clip_norm has 2^20 to 2^21 steps: their multiples up to it are exact in float32
_MARGIN = 2.0**-40  # relative; far above the rounding of a norm in float64
_BLOCK = 1 << 20  # numbers of noise at a time
_TAIL = 10.0  # standard deviations that no number of the noise exceeds
_MOST_CLIENTS = 1 << 16  # for which secure aggregation must resolve the lattice
_LEAST_SHARE = 4096.0  # std of a share of the noise in steps


@dataclass(frozen=True)
class CentralGaussian(Mechanism):
    """The server adds the noise: the guarantee is against who sees the models, not against the server.

    Attributes:
        clip_norm: C, the largest L2 norm of what one client adds to a sum.
        noise_multiplier: z; the noise on each entry of a sum has the standard deviation z C.
        delta: of (epsilon, delta).
        budget: the epsilon that no round may exceed.
        releases: means of one round.
        hidden: the server sees sums only.
    """

    clip_norm: float
    noise_multiplier: float
    delta: float
    budget: float
    releases: int
    hidden: bool

    name: ClassVar[str] = "Gaussian, by the server"
    secrets: ClassVar[tuple[str, ...]] = ("noise",)

    @property
    def step(self) -> float:
        """Distance of two neighbouring numbers of the lattice, a power of two."""
        return step_of(self.clip_norm)

    def bounded(self, client: Client, update: Update) -> Update:
        """The clipped delta as numbers of the lattice, with weight 1; metrics and whole numbers stay at the client.

        Raises:
            ClientFault: E_NONFINITE, the delta has NaN or infinity.
        """
        steps = self._shared(client, clipped(update.delta, self.clip_norm))
        return Update(_on(self.wire(update.delta.layout), steps * self.step), 1.0)

    def _shared(self, client: Client, steps: Steps) -> Steps:
        """The client's part of the noise; here none."""
        return steps

    def wire(self, like: Layout) -> Layout:
        """One floating-point type for all, in which the lattice is exact."""
        return in_dtype(like, torch.float64 if self.hidden else torch.float32)

    def released(self, fed: Federation, updates: Iterator[Update], rule: Rule, asked: int, like: Layout) -> Params:
        """(sum + noise) / asked: the denominator depends on no client's data, and on no client's failure.

        Raises:
            RunError: the round makes more releases than are accounted.
        """
        if rest := fed.initial.layout.slots.keys() - fed.model.live().keys():
            raise RunError(
                f"{sorted(rest)[0]}: running statistics are data, and noise can make a variance negative; "
                'adapt the model in another way than "full"'
            )
        at = _next_release(fed, self.releases)
        wide = in_dtype(like, torch.float64)
        total = np.zeros(sum(n for dtype, n in wide.sizes.items() if dtype.is_floating_point), np.int64)
        for update in updates:
            # An update in the clear is clipped once more: a client that does not clip gets no more influence.
            total += self._sum(update) if self.hidden else clipped(update.delta, self.clip_norm)
        total = self._noisy(fed, total, f"round {fed.round}, release {at}")
        return _on(wide, total * (self.step / asked)).cast(like)

    def _sum(self, update: Update) -> Steps:
        """The exact sum of which secure aggregation returned the mean."""
        return np.rint(_flat(update.delta) * (update.weight / self.step)).astype(np.int64)

    def _noisy(self, fed: Federation, total: Steps, purpose: str) -> Steps:
        scale = self.noise_multiplier * self.clip_norm / self.step
        return total + lattice_noise(fed.secret("noise"), purpose, total, scale)

    def check(self, fed: Federation, model_of: Callable[[Any], Params], before: Any, after: Any) -> None:
        """Check that every trainable tensor has moved in the first round.

        Raises:
            RunError: with the first tensor that stayed.
        """
        then, now = model_of(before), model_of(after)
        for name, tensor in then.items():
            if tensor.is_floating_point() and tensor.numel() and torch.equal(tensor, now[name]):
                raise RunError(
                    f"round {fed.round}: {name} did not move, not even by the noise: the method does not use the mean "
                    "for it, or its dtype is too coarse for the noise"
                )

    def epsilon_after(self, rounds: int) -> float:
        """What this number of rounds spends."""
        return epsilon_of([Releases(self.noise_multiplier, rounds * self.releases)], self.delta)

    def affordable(self, rounds: int) -> int:
        return bisect.bisect_right(range(1, rounds + 1), self.budget, key=self.epsilon_after)

    def spend(self, accountant: Accountant, rounds: int, rows: Sequence[int] | None = None) -> None:
        if not (rounds := self.affordable(rounds)):
            return
        n = rounds * self.releases
        accountant.compose(
            Spent(
                mechanism=self.name,
                unit="client",
                relation="add_remove",
                epsilon=self.epsilon_after(rounds),
                delta=self.delta,
                sensitivity=self.clip_norm * math.sqrt(n),
                sigma=self.noise_multiplier * self.clip_norm,
                composition=f"{n} sums of sensitivity {self.clip_norm:g} in {rounds} rounds, each with every client: "
                "sampling is not counted",
                note=self._note,
            )
        )

    @property
    def _note(self) -> str:
        sees = "the sum of a round" if self.hidden else "every update"
        return f"against who sees the models, not against the server, which sees {sees} without noise"


@dataclass(frozen=True)
class DistributedGaussian(CentralGaussian):
    """Each client adds a share of the noise, so that every sum that can be unmasked has at least all of it.

    Of a cohort of n clients secure aggregation unmasks no sum of fewer than t, more than ``threshold`` n. A share has
    the variance (z C)^2 / t. If all n stay, the noise has n / t times the promised variance.

    The account is that of sums of discrete Gaussians (Kairouz et al. 2021, Theorem 1): with shares of s >= 4096 steps
    its term tau = 10 sum_k exp(-2 pi^2 s^2 k / (k + 1)) is 0 in float64. A share is a rounded normal, whose
    probabilities at x standard deviations differ from a discrete Gaussian's by a relative (x^2 - 1) / (24 s^2).
    """

    threshold: float = 0.67

    name: ClassVar[str] = "Gaussian, by the clients"
    secrets: ClassVar[tuple[str, ...]] = ()

    def _shared(self, client: Client, steps: Steps) -> Steps:
        told = sum_of(client)
        least = max(least_of(self.threshold, int(told.cohort.sum())), 2)
        scale = self.noise_multiplier * self.clip_norm / self.step / math.sqrt(least)
        if scale < _LEAST_SHARE:
            raise refused(f"a share of the noise of {scale:.2g} steps, expected {_LEAST_SHARE:g} at least")
        call = hashlib.sha256(repr((client.memory[MEMORY]["session"], told.number)).encode()).hexdigest()
        return steps + lattice_noise(client.secret("noise"), f"{client.seed} {call}", steps, scale)

    def _noisy(self, fed: Federation, total: Steps, purpose: str) -> Steps:
        return total

    def epsilon_after(self, rounds: int) -> float:
        return epsilon_of_concentrated(rounds * self.releases / (2 * self.noise_multiplier**2), self.delta)

    @property
    def _note(self) -> str:
        return (
            "against a server that follows the protocol, too: it sees sums with noise only; c clients that tell it "
            "their noise take c shares of it away, and a round that a resume repeats is one release more to it"
        )


def under(aggregation: Aggregator, method: Any, privacy: Any) -> Aggregator:
    """The aggregation with the client-level mechanism that the [privacy] table names.

    Raises:
        InputError: it does not fit the method or the aggregation.
    """
    name, distributed = privacy.mechanism or "gaussian", privacy.mechanism == "distributed_gaussian"
    if privacy.unit != "client":
        raise InputError(
            f'privacy.unit = "{privacy.unit}": this method has no mechanism of its own, and "{name}" protects a '
            '"client"; for records mechanism = "dp_sgd"'
        )
    if privacy.clip_norm is None:
        raise InputError("privacy.clip_norm is missing: the norm to which a client's update is clipped, e.g. 1.0")
    if distributed and not isinstance(aggregation, Secure):
        raise InputError(
            f'privacy.mechanism = "{name}": a share of the noise hides no update; set aggregator = "secagg"'
        )
    releases, z = len(method.means), privacy.noise_multiplier
    if z is None:
        calibrate = noise_multiplier_for_concentrated if distributed else noise_multiplier_for
        z = calibrate(privacy.target_epsilon, privacy.delta, max(method.rounds, 1) * releases)
    budget = math.inf if privacy.halt_at_epsilon is None else privacy.halt_at_epsilon
    hidden = isinstance(aggregation, Secure)
    mechanism = CentralGaussian(privacy.clip_norm, z, privacy.delta, budget, releases, hidden)
    if isinstance(aggregation, Secure) and distributed:
        mechanism = DistributedGaussian(**vars(mechanism), threshold=aggregation.threshold)
    if method.rounds and not mechanism.affordable(1):
        spent = mechanism.epsilon_after(1)
        raise InputError(f"privacy.halt_at_epsilon = {budget:g}: one round spends {spent:.4g}; more noise costs less")
    if isinstance(aggregation, Secure):
        aggregation = _resolving(aggregation, mechanism)
    noisy: Aggregator = copy.copy(aggregation)
    object.__setattr__(noisy, "mechanism", mechanism)
    return noisy


def _resolving(aggregation: Secure, mechanism: CentralGaussian) -> Secure:
    """Secure aggregation whose fixed-point numbers hold a bounded update and its noise, and resolve the lattice."""
    if aggregation.clip_norm is not None:
        raise InputError("aggregation.clip_norm: privacy.clip_norm clips already; drop it")
    if aggregation.compact:
        raise InputError("aggregation.compact: 32 bits do not hold an update and its noise; drop it under [privacy]")
    largest = mechanism.clip_norm * (1 + _TAIL * mechanism.noise_multiplier)
    found = replace(aggregation, bound=2.0 ** math.frexp(largest)[1])
    if FixedPoint(64, found.bound, _MOST_CLIENTS).step > mechanism.step:
        raise InputError(f"privacy: noise of {mechanism.noise_multiplier:.4g} clip_norm does not fit into 64 bits")
    return found


def _next_release(fed: Federation, releases: int) -> int:
    t, at = fed.process_memory.get("private", (0, 0))
    at = at + 1 if t == fed.round else 1
    fed.process_memory["private"] = fed.round, at
    if at > (accounted := releases if fed.round else 0):
        raise RunError(f"round {fed.round}: release {at} of a round for which {accounted} are accounted")
    return at


def step_of(clip_norm: float) -> float:
    """Distance of two neighbouring numbers of the lattice: 2^-21 to 2^-20 of the clipping norm, a power of two."""
    return 2.0 ** (math.frexp(clip_norm)[1] - 1 - _LATTICE_BITS)


def clipped(delta: Params, clip_norm: float) -> Steps:
    """The vector of all floating-point entries, scaled down to the norm at most, rounded towards zero to the lattice.

    The L2 norm of the result times :func:`step_of` is at most ``clip_norm``. A second call changes nothing.

    Raises:
        ClientFault: E_NONFINITE, an entry is NaN or infinite.
    """
    x = _flat(delta)
    norm = math.sqrt(float(x @ x))
    if not math.isfinite(norm):
        raise ClientFault(E_NONFINITE, "the update has NaN or infinity")
    factor = 1 / step_of(clip_norm)
    if norm > clip_norm * (1 - _MARGIN):
        factor *= clip_norm * (1 - 2 * _MARGIN) / norm
    return np.trunc(x * factor).astype(np.int64)


def lattice_noise(key: bytes, purpose: str, steps: Steps, scale: float) -> Steps:
    """Normal noise of standard deviation ``scale`` for these numbers, rounded to whole numbers.

    The numbers themselves are part of the purpose: a repeated round gets its noise again, and a round that differs
    gets other noise, not the same noise on other data.
    """
    purpose = f"client level/{purpose}/{hashlib.sha256(steps.tobytes()).hexdigest()}"
    found = np.empty(len(steps), np.int64)
    for at in range(0, len(steps), _BLOCK):
        part = found[at : at + _BLOCK]
        part[:] = np.rint(scale * noise.gaussian(key, f"{purpose}/{at}", part.shape))
    return found


def _flat(delta: Params) -> NDArray[np.float64]:
    flats = [flat.double().numpy() for dtype, flat in delta.flats.items() if dtype.is_floating_point]
    return flats[0] if len(flats) == 1 else np.concatenate([*flats, np.zeros(0)])


def _on(layout: Layout, values: NDArray[np.floating[Any]]) -> Params:
    """Values of the one floating-point type of a layout; other entries are 0."""
    flats = {
        dtype: torch.from_numpy(values).to(dtype) if dtype.is_floating_point else torch.zeros(size, dtype=dtype)
        for dtype, size in layout.sizes.items()
    }
    return Params.from_flat(layout, flats)
