"""Noise on one sum over records. Under secure aggregation, each client adds a share of the noise.

A method whose sums change by a bounded amount with a record needs no clipping of whole clients, and one sum has the
noise of one release however many clients there are. The shares are those of
:class:`~fedfm.aggregation._client_level.DistributedGaussian`: no sum of fewer than t clients can be unmasked, and a
share has 1/t of the variance. Kairouz, Liu, Steinke. ICML 2021, arXiv:2102.06387, Theorem 1.
"""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch

from fedfm.aggregation._lattice import Steps, flat_of, on_layout
from fedfm.aggregation._secagg import MEMORY
from fedfm.aggregation._secagg_client import refusal, sum_of
from fedfm.aggregation._secagg_keys import least_of
from fedfm.aggregation.base import Aggregator, Mechanism
from fedfm.aggregation.secure import Secure
from fedfm.core.client import Client, Update
from fedfm.errors import Faults
from fedfm.linalg.params import Params
from fedfm.privacy.noise import cover

STEP = 2.0**-24  # distance of the lattice on which a client's sums are exact
_LEAST_SHARE = 4096.0  # smallest standard deviation of a share, in steps
_MOST_CLIENTS = 1 << 10  # for more clients, fixed-point numbers would lack points of the lattice


@runtime_checkable
class SharesNoise(Protocol):
    """A method with one mean, whose updates lie on the lattice of :data:`STEP` and have weight 1."""

    @property
    def shared_sigma(self) -> float | None:
        """Standard deviation of the noise on each entry of the sum; None if the clients add no shares."""


@dataclass(frozen=True)
class RecordShares(Mechanism):
    """Each client adds a share of the noise to its part of the only sum of a run.

    The method accounts for the release. A client answers once in a run: the difference of two sums could be one
    client's part, with only this client's share of the noise.

    Attributes:
        sigma: standard deviation of the noise of the fewest clients whose sum can be unmasked.
        threshold: more than this fraction of the clients is needed to unmask a sum.
    """

    sigma: float
    threshold: float

    withholds: ClassVar[bool] = True

    def bound(self, client: Client, update: Update) -> Update:
        """The update with a share of the noise, and without metrics.

        Raises:
            ClientFault: the run has had its sum already, or has too many clients or too little noise for the lattice.
            ValueError: an entry of the update is not a point of the lattice.
        """
        flat = flat_of(update.delta)
        steps = np.rint(flat / STEP).astype(np.int64)
        if not np.array_equal(steps * STEP, flat):
            raise ValueError("the update does not lie on the lattice of its noise")
        return Update(on_layout(update.delta.layout, self._noisy(client, steps) * STEP), 1.0)

    def blank(self, client: Client) -> Update:
        """An update of zeros with the noise of any other update, since the sum needs every share."""
        return self.bound(client, Update(Params({"": torch.zeros(sum_of(client).size, dtype=torch.float64)}), 1.0))

    def _noisy(self, client: Client, steps: Steps) -> Steps:
        request = sum_of(client)
        clients = int(request.cohort.sum())
        scale = self.sigma / STEP / math.sqrt(max(least_of(self.threshold, clients), 2))
        if clients > _MOST_CLIENTS:
            raise refusal(f"the sum has {clients} clients, expected at most {_MOST_CLIENTS}")
        if scale < _LEAST_SHARE:
            raise refusal(f"the share of the noise has {scale:.2g} steps, expected at least {_LEAST_SHARE:g}")
        call = hashlib.sha256(repr((client.memory[MEMORY]["session"], request.number)).encode()).hexdigest()
        if client.write_once("record-shares", call.encode()) != call.encode():
            raise refusal("the server asks for a second sum of the same rows, which no epsilon covers; start a new run")
        return np.asarray(cover(client.secret("noise"), f"record shares/{client.id}/{call}", steps, scale))


def sharing(aggregation: Aggregator, method: Any) -> Aggregator:
    """The aggregation in which clients add shares of the noise, if the method's mechanism asks for it.

    Raises:
        InputError: the aggregation shows single updates, or changes them.
    """
    if not isinstance(method, SharesNoise) or method.shared_sigma is None:
        return aggregation
    faults = Faults()
    if not isinstance(aggregation, Secure):
        faults.say(
            'privacy.mechanism = "distributed_gaussian": shares of the noise alone hide no sum; set aggregator = '
            '"secagg"',
            key="privacy.mechanism",
        )
        faults.refuse()
    assert isinstance(aggregation, Secure)  # noqa: S101 - refused above
    if aggregation.clip_norm is not None:
        faults.say("aggregation.clip_norm: sums over rows are not clipped; drop it", key="aggregation.clip_norm")
    if aggregation.compact:
        faults.say("aggregation.compact: 32 bits cannot hold sums with their noise; drop it", key="aggregation.compact")
    if aggregation.bound != Secure().bound:  # each client would round its share away, or send none of a larger sum
        faults.say(
            "aggregation.bound: fixed-point numbers of another bound than the default do not have the points of the "
            "noise; drop it",
            key="aggregation.bound",
        )
    faults.refuse()
    noisy: Aggregator = copy.copy(aggregation)
    object.__setattr__(noisy, "mechanism", RecordShares(method.shared_sigma, aggregation.threshold))
    return noisy
