"""Secure aggregation: the weighted mean, where the server sees only the sum.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth. Practical Secure Aggregation for
Privacy-Preserving Machine Learning. CCS 2017, ePrint 2017/281. Bell, Bonawitz, Gascon, Lepoint, Raykova. Secure
Single-Server Aggregation with (Poly)Logarithmic Overhead. CCS 2020, ePrint 2020/704.
``[privacy] aggregator = "secagg"`` also chooses secure aggregation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fedfm.aggregation._secagg import SecAgg
from fedfm.aggregation._secagg_keys import LEAST
from fedfm.aggregation.mean import Mean
from fedfm.core.client import Update
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.update_metrics import BEFORE, JUDGED, LOSS_BEFORE, PASSES
from fedfm.linalg.params import Params


@dataclass(frozen=True)
class Secure(Mean):
    """sum_k n_k x_k / sum_k n_k. Updates, weights and metrics are hidden; the sum and the cohort are not.

    If the sum has m clients, every entry of the mean is exact up to (m s / 2) / sum_k n_k, and rounded once to its
    dtype. For a cohort of n clients, the step s of the fixed-point numbers is below n bound / 2^62, or below
    n bound / 2^30 with ``compact``. If updates have the root mean square r and the weight w, the relative error of
    ``compact`` is about n bound / (12^(1/2) 2^30 w r): for five clients it is below 1e-6 while bound is below 740 w r.
    A run gives one notice if a sum is rounded by more than 1e-6.

    ``compact`` is not the default, because it needs a bound close to r. Before the updates exist, r is unknown, and a
    client that reported r would disclose it. With a bound from earlier sums, clients would have to refuse updates that
    grow. 64 bits need no such bound: with the default bound their step is below n 2^-34.
    ``benchmarks/secagg_compact.py`` compares the bounds of several runs.

    A client whose update is not finite, or above ``bound``, adds zeros with weight 0, since a refusal would disclose
    something about its rows. The mean is then over the other clients. If all clients add zeros, the run ends.

    A client that sends a false update is not detected. A server that deviates from the protocol can see a client's
    update only with the help of 2 t - h of the h clients that have shares of this client's seeds. A seed is
    determined by t shares, where t is more than ``threshold`` times h.
    """

    bound: float = setting(
        2.0**28,
        "largest product of weight and an entry of an update; a client that exceeds it adds nothing",
        gt=0,
        finite=True,
    )
    compact: bool = setting(
        False, "32 instead of 64 bits per entry: half the bytes; needs a bound close to the updates"
    )
    clip_norm: float | None = setting(None, "clients scale an update down to this L2 norm", gt=0)
    threshold: float = setting(0.67, "more than this fraction of the clients must stay to the end", ge=0.5, lt=1)
    neighbours: int = setting(0, "number of clients with which each shares masks; 0: about 4 log2 n of n clients", ge=0)
    metrics: tuple[str, ...] = setting(
        ("loss", BEFORE, LOSS_BEFORE, JUDGED, PASSES), "metrics that are summed; others stay at the clients"
    )

    @property
    def transport(self) -> SecAgg:  # type: ignore[override]
        return SecAgg(self.compact, self.bound, self.clip_norm, self.threshold, self.neighbours, self.metrics)

    def least(self) -> int:
        return LEAST

    def reduce(self, fed: Federation, updates: Iterator[Update]) -> Params:
        (mean,) = updates  # a running sum would round the mean twice more
        return mean.delta
