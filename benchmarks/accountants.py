"""Epsilon of the same noise by three accountants: fedfm's, Flower's, and Opacus' where it is installed.

    python benchmarks/accountants.py

Noise multiplier z, sampling rate q and number of steps are equal; neighbours differ by one unit more or less. fedfm
composes privacy loss distributions, Flower Renyi divergences. With q = 1 fedfm's figure is exact.
"""

from __future__ import annotations

import common
from flwr.supercore.privacy_accounting import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

from fedfm.privacy.composition import Releases, epsilon_of

DELTA, UNITS = 1e-5, 1000
CASES = ((1.0, 0.01, 1000), (1.0, 0.1, 100), (0.8, 0.2, 50), (2.0, 0.5, 50), (4.0, 0.1, 100), (6.0, 1.0, 30))


def flowers(z: float, q: float, times: int) -> float:
    """Epsilon by Flower's accountant."""
    config = PrivacyConfig(DELTA, UNITS, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.POISSON)
    accountant = RdpAccountant(config)
    accountant.compose(
        GaussianPrivacyEvent(noise_multiplier=z, sample_size=round(q * UNITS), population_size=UNITS), times
    )
    return accountant.get_epsilon(DELTA)


def opacus(z: float, q: float, times: int) -> float | None:
    """Epsilon by the default accountant of Opacus; None where it is not installed."""
    try:
        from opacus.accountants import PRVAccountant
    except ImportError:
        return None
    accountant = PRVAccountant()
    accountant.history = [(z, q, times)]
    return float(accountant.get_epsilon(DELTA))


def main() -> None:
    rows = []
    for z, q, times in CASES:
        ours, theirs = epsilon_of([Releases(z, times, q)], DELTA), flowers(z, q, times)
        rows.append(
            {
                "z": z,
                "q": q,
                "steps": times,
                "fedfm": ours,
                "Flower": theirs,
                "Opacus": opacus(z, q, times),
                "Flower / fedfm": theirs / ours,
            }
        )
    print(common.markdown(rows))


if __name__ == "__main__":
    main()
