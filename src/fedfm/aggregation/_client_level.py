"""Client-level differential privacy of a mean. It hides whether a client, with all of its rows, took part at all.

McMahan, Ramage, Talwar, Zhang. Learning Differentially Private Recurrent Language Models. ICLR 2018, arXiv:1710.06963,
Algorithm 1 with a fixed denominator, equal weights and flat clipping. With ``distributed_gaussian`` each client adds
its share of the noise under secure aggregation: Kairouz, Liu, Steinke. The Distributed Discrete Gaussian Mechanism for
Federated Learning with Secure Aggregation. ICML 2021, arXiv:2102.06387. With ``clip_quantile`` the clipping norm adapts
to the norms of the clients' updates: :mod:`fedfm.privacy.clipping`.

A clipped update is rounded towards zero to a lattice. This cannot increase its norm, so the sensitivity of the sum is
exactly ``clip_norm``. Sums of lattice points are exact, and the noise is rounded to the lattice. So the result is a
rounded Gaussian mechanism, and the low bits of floats disclose nothing more (Mironov. On Significance of the Least
Significant Bits for Differential Privacy. CCS 2012).
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from fedfm.aggregation._lattice import Steps, add_noise, clip_to_lattice, flat_of, norm_of, on_layout, step_of
from fedfm.aggregation._secagg import MEMORY
from fedfm.aggregation._secagg_client import refusal, sum_of
from fedfm.aggregation._secagg_keys import least_of
from fedfm.aggregation._secagg_session import Sum
from fedfm.aggregation.base import Mechanism, Rule
from fedfm.core.client import SCALE, Client, ClientId, Update
from fedfm.core.federation import Federation
from fedfm.errors import E_FIELD, ClientFault, InputError, RunError
from fedfm.linalg.params import Layout, Params, in_dtype, layout_of
from fedfm.privacy.accountant import Accountant, Spent
from fedfm.privacy.clipping import AdaptiveClip
from fedfm.privacy.cohorts import by_coins
from fedfm.privacy.composition import Releases, epsilon_of, epsilon_of_concentrated
from fedfm.privacy.noise import digest

if TYPE_CHECKING:
    from fedfm.models.model import Model

WITHIN = "+within"  # entry of an update under an adaptive clip: 1/2 if the norm is within the clip, else -1/2
CLIP, SHARE = "clip_norm", "within_clip_norm"  # names of metrics of a round
_CLIP = "CentralGaussian/clip"  # key of the server's memory
_AGAIN = "releases again"  # key in the server's store; its value is the number of repeated releases
_LEAST_SHARE = 4096.0  # smallest standard deviation of a client's share of the noise, in lattice steps
_STATISTICS = (
    'privacy.unit = "client": {}: running statistics of batch norm are data, and noise can make a variance negative; '
    'expected another model.adaptation than "full", or a model with group or layer norm'
)


@dataclass(frozen=True)
class CentralGaussian(Mechanism):
    """The server adds the noise. The guarantee holds against readers of the models, but not against the server.

    Attributes:
        clip_norm: C, the largest L2 norm of a client's part of a sum. Under an adaptive clip it is 1, because sums
            are then in units of the round's clip.
        noise_multiplier: z; the noise on each entry of a sum has the standard deviation z C.
        delta: delta of (epsilon, delta).
        budget: the largest epsilon of the whole run; a round that would exceed it is not run.
        releases: number of means in a round.
        hidden: whether the server sees only sums.
        rate: q. If it is below 1, a secret coin for each of the N clients decides whether the client is in a
            round, and sums are divided by q N.
        adaptive: how the clip adapts to the clients; None: the clip is fixed.
    """

    clip_norm: float
    noise_multiplier: float
    delta: float
    budget: float
    releases: int
    hidden: bool
    rate: float = 1.0
    adaptive: AdaptiveClip | None = None

    name: ClassVar[str] = "Gaussian, by the server"
    message_type: ClassVar[Any] = float | None
    figures: ClassVar[tuple[str, ...]] = (CLIP, SHARE)
    withholds: ClassVar[bool] = True

    @property
    def secrets(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("noise", "cohort") if self.rate < 1 else ("noise",)

    @property
    def step(self) -> float:
        """Distance between neighbouring numbers of the lattice, a power of two."""
        return step_of(self.clip_norm)

    def fits(self, model: Model) -> None:
        if rest := model.layout.slots.keys() - model.live().keys():
            raise InputError(_STATISTICS.format(sorted(rest)[0]))

    # --- cohort

    @property
    def fraction(self) -> float | None:
        return self.rate if self.rate < 1 else None

    def cohort(self, fed: Federation) -> Sequence[ClientId]:
        return by_coins(fed.secret("cohort"), fed.round, fed.clients, self.rate)

    def divisor(self, fed: Federation, asked: Sequence[ClientId]) -> float:
        """The size of the cohort, or its expected size. The divisor depends on no client's coin, data or failure.

        Raises:
            RunError: the method asks other clients than the accountant assumes.
        """
        if self.fraction is None:
            return len(asked)
        if set(asked) != set(self.cohort(fed)):
            raise RunError(
                f"round {fed.round}: this method does not ask the clients that fed.sample(fraction) draws, but "
                "[privacy] is accounted for them; set method.fraction = 1.0"
            )
        return self.fraction * len(fed.clients)

    # --- client half

    def bound(self, client: Client, update: Update) -> Update:
        """The clipped delta on the lattice, with weight 1. Metrics and integers are not sent.

        Raises:
            ClientFault: E_NONFINITE, the delta has NaN or infinity; E_FIELD, the message has no clip.
        """
        if self.adaptive is None:
            steps = clip_to_lattice(update.delta, self.clip_norm)
        else:
            clip = client.scale
            if clip is None or not 0 < clip < math.inf:
                raise ClientFault(E_FIELD, f"the clipping norm is {clip}, expected a number above 0")
            bit = 0.5 if norm_of(flat_of(update.delta)) <= clip else -0.5
            steps = np.append(clip_to_lattice(update.delta, self.clip_norm, clip), round(bit / self.step))
        steps = self._add_share(client, steps)
        return Update(on_layout(self.wire(update.delta.layout), steps * self.step), 1.0)

    def blank(self, client: Client) -> Update:
        """An update of zeros, which has the weight and the noise of any other update."""
        request = client.aggregation_message
        layout = client.model.layout
        if isinstance(request, Sum) and request.size:
            layout = layout_of((("", torch.float64, (request.size - (self.adaptive is not None),)),))
        flats = {dtype: torch.zeros(size, dtype=dtype) for dtype, size in layout.sizes.items()}
        return self.bound(client, Update(Params.from_flat(layout, flats), 1.0))

    def _add_share(self, client: Client, steps: Steps) -> Steps:
        """Add the client's share of the noise; in this class clients add none."""
        return steps

    def wire(self, like: Layout) -> Layout:
        """A layout with one floating-point type that represents the lattice exactly. An adaptive clip adds one
        entry.
        """
        like = in_dtype(like, dtype := torch.float64 if self.hidden else torch.float32)
        return like if self.adaptive is None else layout_of((*like.entries, (WITHIN, dtype, (1,))))

    # --- server half

    def message(self, fed: Federation) -> Mapping[str, Any]:
        """The round's clip, which is sent to the clients."""
        return {} if self.adaptive is None else {SCALE: _clip(fed, self.adaptive)}

    def release(self, fed: Federation, updates: Iterator[Update], rule: Rule, asked: float, like: Layout) -> Params:
        """(sum + noise) / asked. The denominator does not depend on any client's data or failure.

        Raises:
            RunError: the round makes more releases than are accounted for.
        """
        if rest := fed.initial.layout.slots.keys() - fed.model.live().keys():
            raise RunError(_STATISTICS.format(sorted(rest)[0]))
        at = _next_release(fed, self.releases)
        wide = in_dtype(self.wire(like), torch.float64)
        total = np.zeros(sum(n for dtype, n in wide.sizes.items() if dtype.is_floating_point), np.int64)
        for update in updates:
            # If the server sees single updates, it clips them again, so a client that does not clip gains no influence.
            total += self._sum(update) if self.hidden else self._again(update.delta)
        if self.rate < 1:
            fed.heard = max(round(asked), 1)  # because the number of drawn clients is secret
        if not self.fresh:
            self._enter(fed, at, total)
        total = self._noisy(fed, total, f"round {fed.round}, release {at}", asked)
        scale = self.step / asked
        if self.adaptive is not None:
            clip, share = _clip(fed, self.adaptive), float(total[-1]) * scale + 0.5
            fed.memory[_CLIP] = self.adaptive.following(clip, share)
            fed.metrics |= {CLIP: clip, SHARE: share}
            total, scale = total[:-1], scale * clip
        return on_layout(in_dtype(like, torch.float64), total * scale).cast(like)

    def _enter(self, fed: Federation, at: int, total: Steps) -> None:
        """Write a digest of the sum to the disk before its release. If the round was released before with another sum,
        count one more release.

        Raises:
            RunError: one more release would exceed the budget.
        """
        name, mark = f"release {fed.round} {at}", digest(total).encode()
        before = fed.store.get(name, mark)
        if before != mark:
            again = self.repeat_count(fed.store) + 1
            if self.affordable(fed.round + again) < fed.round + again:
                raise RunError(
                    f"round {fed.round} was released before, with other clients; one more release would exceed "
                    "privacy.halt_at_epsilon"
                )
            fed.store[_AGAIN] = str(again).encode()
            fed.notice(f"round {fed.round} was released before, with another sum; epsilon includes one more release")
        fed.store[name] = mark

    def repeat_count(self, store: Mapping[str, bytes]) -> int:
        return int(store.get(_AGAIN, b"0"))

    def _sum(self, update: Update) -> Steps:
        """The exact sum, computed from the mean that secure aggregation returned."""
        return np.rint(flat_of(update.delta) * (update.weight / self.step)).astype(np.int64)

    def _again(self, delta: Params) -> Steps:
        """One client's update, clipped again by the server."""
        if self.adaptive is None:
            return clip_to_lattice(delta, self.clip_norm)
        bit = math.copysign(0.5, float(delta[WITHIN]))
        rest = delta.only(name for name in delta if name != WITHIN)
        return np.append(clip_to_lattice(rest, self.clip_norm), round(bit / self.step))

    def _noisy(self, fed: Federation, total: Steps, purpose: str, asked: float) -> Steps:
        return self._add_noise(fed.secret("noise"), purpose, total, asked)

    def _add_noise(self, key: bytes, purpose: str, steps: Steps, clients: float, shares: int = 1) -> Steps:
        """The numbers plus the noise, or plus one of ``shares`` equal shares of the noise."""
        z, unit = self.noise_multiplier, self.clip_norm / self.step / math.sqrt(shares)
        purpose = f"{purpose}, step {self.step!r}"
        if self.adaptive is None:
            return add_noise(key, purpose, steps, z * unit)
        sigma_b = self.adaptive.count_noise(clients, z)
        purpose = f"{purpose}, {digest(steps)}"  # so that the same count from other updates gets other noise
        own = add_noise(key, purpose, steps[:-1], self.adaptive.update_noise(z, sigma_b) * unit)
        return np.append(own, add_noise(key, f"{purpose}, count", steps[-1:], sigma_b * unit))

    def check(self, fed: Federation, model_of: Callable[[Any], Params], before: Any, after: Any) -> None:
        """Check that every trainable tensor changed in the first round.

        A frozen tensor cannot change: states, updates and means have only the trainable tensors, and loading refuses
        any other name.

        Raises:
            RunError: a tensor did not change; the error names the first one.
        """
        then, now = model_of(before), model_of(after)
        for name, tensor in then.items():
            if tensor.is_floating_point() and tensor.numel() and torch.equal(tensor, now[name]):
                raise RunError(
                    f"round {fed.round}: {name} did not change, not even by the noise: the method does not use the "
                    "mean for it, or its dtype is too coarse for the noise"
                )

    # --- accounting

    def epsilon_after(self, rounds: int) -> float:
        """Epsilon after this number of rounds. All means of one round use the same coins."""
        if self.rate < 1:
            return epsilon_of(
                [Releases(self.noise_multiplier / math.sqrt(self.releases), rounds, self.rate)], self.delta
            )
        return epsilon_of([Releases(self.noise_multiplier, rounds * self.releases)], self.delta)

    def affordable(self, rounds: int) -> int:
        if self.budget == math.inf:
            return rounds
        return bisect.bisect_right(range(1, rounds + 1), self.budget, key=self.epsilon_after)

    def sensitivity(self, rounds: int) -> float:
        """Sensitivity of all sums of this number of rounds together, in units of ``clip_norm``."""
        return math.sqrt(rounds * self.releases)

    def spend(self, accountant: Accountant, rounds: int, rows: Sequence[int] | None = None) -> None:
        if not (rounds := self.affordable(rounds)):
            return
        accountant.compose(
            Spent(
                mechanism=self.name,
                unit="client",
                relation="add_remove",
                epsilon=self.epsilon_after(rounds),
                delta=self.delta,
                sensitivity=self.clip_norm * self.sensitivity(rounds),
                sigma=self.noise_multiplier * self.clip_norm,
                composition=f"{rounds * self.releases} sums of sensitivity {self._unit} in {rounds} rounds, "
                + self._taking_part,
                note=self._note,
            )
        )

    @property
    def _unit(self) -> str:
        if self.adaptive is None:
            return f"{self.clip_norm:g}"
        return f"1 in units of the round's clipping norm, with the count of the clients within it ({CLIP})"

    @property
    def _taking_part(self) -> str:
        if self.rate < 1:
            return (
                f"each client in each round with probability {self.rate:g} by a secret coin, composed by privacy loss "
                "distributions; sensitivity and sigma are those of a client that is in every round"
            )
        return "every client in each round: sampling is not counted"

    @property
    def _note(self) -> str:
        sees = "the sum of a round" if self.hidden else "every update"
        note = f"against those who see the models, but not against the server, which sees {sees} without noise"
        if self.rate < 1:
            note += ", and not against those who see who took part (metrics.jsonl, messages.jsonl, report)"
        return note


@dataclass(frozen=True)
class DistributedGaussian(CentralGaussian):
    """Each client adds a share of the noise, so that every sum that can be unmasked has at least the full noise.

    In a cohort of n clients, secure aggregation unmasks no sum of fewer than t > ``threshold`` n clients. A share has
    the variance (z C)^2 / t. If all n clients stay, the noise has n / t times the stated variance.

    The accounting is as for sums of discrete Gaussians (Kairouz et al. 2021, Theorem 1). If the standard deviation
    s of a share is at least 4096 steps, the theorem's term tau = 10 sum_k exp(-2 pi^2 s^2 k / (k + 1)) is 0 in float64.
    A share is a rounded normal variable. Its probabilities at x standard deviations have a relative difference of
    (x^2 - 1) / (24 s^2) from those of a discrete Gaussian.

    An adaptive clip costs no additional epsilon: in concentrated privacy the two parts of a sum, updates and count,
    add up as in Theorem 1 of Andrew et al. A server that sends a false clip cannot weaken a client's privacy, because
    the client measures both the norm of its update and the noise in units of this clip.
    """

    threshold: float = 0.67

    name: ClassVar[str] = "Gaussian, by the clients"
    fresh: ClassVar[bool] = True

    @property
    def secrets(self) -> tuple[str, ...]:  # type: ignore[override]
        return ()

    def _add_share(self, client: Client, steps: Steps) -> Steps:
        request = sum_of(client)
        clients = int(request.cohort.sum())
        least = max(least_of(self.threshold, clients), 2)
        scale = self.noise_multiplier * self.clip_norm / self.step / math.sqrt(least)
        if scale < _LEAST_SHARE:
            raise refusal(f"the share of the noise has {scale:.2g} steps, expected at least {_LEAST_SHARE:g}")
        call = hashlib.sha256(repr((client.memory[MEMORY]["session"], request.number)).encode()).hexdigest()
        return self._add_noise(client.secret("noise"), f"{client.seed} {call}", steps, clients, least)

    def _noisy(self, fed: Federation, total: Steps, purpose: str, asked: float) -> Steps:
        return total

    def epsilon_after(self, rounds: int) -> float:
        return epsilon_of_concentrated(rounds * self.releases / (2 * self.noise_multiplier**2), self.delta)

    @property
    def _note(self) -> str:
        return (
            "against a server that follows the protocol, too: it only sees sums with noise; c clients that reveal "
            "their noise to it remove c shares; a round that a resume repeats is one more release to it, and is counted"
        )


def _clip(fed: Federation, adaptive: AdaptiveClip) -> float:
    """The round's clipping norm."""
    return float(fed.memory.get(_CLIP, adaptive.start))


def _next_release(fed: Federation, releases: int) -> int:
    t, at = fed.process_memory.get("private", (0, 0))
    at = at + 1 if t == fed.round else 1
    fed.process_memory["private"] = fed.round, at
    if at > (accounted := releases if fed.round else 0):
        raise RunError(f"round {fed.round}: release {at} in a round for which {accounted} are accounted")
    return at
