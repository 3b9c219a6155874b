"""The client-level privacy mechanism of a mean, which the [privacy] table of an experiment chooses."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

from fedfm.aggregation._client_level import CentralGaussian, DistributedGaussian
from fedfm.aggregation._correlated import CorrelatedGaussian
from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.secure import Secure
from fedfm.core.method import Method, fraction_of
from fedfm.errors import Faults, InputError
from fedfm.privacy.clipping import AdaptiveClip
from fedfm.privacy.composition import noise_multiplier_for, noise_multiplier_for_concentrated
from fedfm.privacy.correlated import strategy
from fedfm.privacy.crypto.fixed_point import FixedPoint
from fedfm.privacy.spec import PrivacySpec, need

__all__ = ["CentralGaussian", "CorrelatedGaussian", "DistributedGaussian", "under"]

_TAIL = 10.0  # the largest noise value that the numbers must be able to represent, in standard deviations
_MOST_CLIENTS = 1 << 16  # sums under secure aggregation must be exact on the lattice for up to this many clients


def under(aggregation: Aggregator, method: Method[Any], privacy: PrivacySpec) -> Aggregator:
    """The aggregation with the client-level mechanism that the [privacy] table names.

    Raises:
        InputError: the mechanism does not fit the method or the aggregation.
    """
    name = privacy.mechanism or "gaussian"
    hidden, correlated = isinstance(aggregation, Secure), name == "correlated_gaussian"
    faults = Faults()
    if privacy.unit != "client":
        records = '; for records mechanism = "dp_sgd"' if method.traits.rows_by_optimiser else ""
        faults.say(
            f'privacy.unit = "{privacy.unit}": this method has no mechanism of its own, and "{name}" protects a '
            f'"client"{records}',
            key="privacy.unit",
        )
    if privacy.clip_norm is None:
        faults.say(
            "privacy.clip_norm is missing: the norm to which a client's update is clipped, e.g. 1.0",
            key="privacy.clip_norm",
        )
    if name == "distributed_gaussian" and not hidden:
        faults.say(
            f'privacy.mechanism = "{name}": shares of the noise alone hide no update; set aggregator = "secagg"',
            key="privacy.mechanism",
        )
    faults.refuse()
    adaptive = _adaptive(method, privacy, correlated)
    fraction = fraction_of(method)
    period = _period(method, fraction) if correlated else 1
    # A secret sample of clients amplifies privacy, except in two cases. Secure aggregation refuses a cohort that is too
    # small, and this discloses the cohort's size. A method with several means, such as ccvr, may ask different clients
    # for each mean.
    rate = fraction if name == "gaussian" and not hidden and len(method.means) == 1 else 1.0
    z = privacy.noise_multiplier or _noise_multiplier(name, method, privacy, rate, period)
    mechanism = CentralGaussian(
        clip_norm=need(privacy.clip_norm, "clip_norm") if adaptive is None else 1.0,
        noise_multiplier=z,
        delta=need(privacy.delta, "delta"),
        budget=math.inf if privacy.halt_at_epsilon is None else privacy.halt_at_epsilon,
        releases=len(method.means),
        hidden=hidden,
        rate=rate,
        adaptive=adaptive,
    )
    if isinstance(aggregation, Secure) and name == "distributed_gaussian":
        mechanism = DistributedGaussian(**vars(mechanism), threshold=aggregation.threshold)
    if correlated:
        mechanism = CorrelatedGaussian(**vars(mechanism), rounds=method.rounds, period=period)
    if method.rounds and not mechanism.affordable(1):
        spent = mechanism.epsilon_after(1)
        raise InputError(
            f"privacy.halt_at_epsilon = {mechanism.budget:g}: one round spends {spent:.4g}; more noise costs less",
            key="privacy.halt_at_epsilon",
        )
    if isinstance(aggregation, Secure):
        aggregation = _resolving(aggregation, mechanism)
    noisy: Aggregator = copy.copy(aggregation)
    object.__setattr__(noisy, "mechanism", mechanism)
    return noisy


def _adaptive(method: Method[Any], privacy: PrivacySpec, correlated: bool) -> AdaptiveClip | None:
    if privacy.clip_quantile is None:
        return None
    if correlated:
        raise InputError(
            'privacy.clip_quantile: with mechanism = "correlated_gaussian" noise cancels between rounds only if all '
            "rounds have the same clipping norm, and the quantile would change it; drop one of the two",
            key="privacy.clip_quantile",
        )
    if len(method.means) != 1:
        raise InputError(
            f"privacy.clip_quantile: a clip adapts to one mean per round, but this method has {len(method.means)}; "
            f"drop it",
            key="privacy.clip_quantile",
        )
    return AdaptiveClip(need(privacy.clip_norm, "clip_norm"), privacy.clip_quantile, privacy.clip_learning_rate)


def _period(method: Method[Any], fraction: float) -> int:
    """b, the number of rounds within which every client takes part once."""
    where, period = 'privacy.mechanism = "correlated_gaussian":', round(1 / fraction)
    if len(method.means) != 1:
        raise InputError(
            f"{where} it is for one mean per round, but this method has {len(method.means)}", key="privacy.mechanism"
        )
    if not math.isclose(period * fraction, 1.0):
        raise InputError(
            f"{where} clients take turns, so 1 / method.fraction must be whole; method.fraction is {fraction:g}",
            key="privacy.mechanism",
        )
    if period == 1:
        fewer = ", or set method.fraction, e.g. 0.1" if "fraction" in vars(method) else ""
        raise InputError(
            f"{where} all clients take part in every round, so independent noise is best for the last model; "
            f'set privacy.mechanism = "gaussian"{fewer}',
            key="privacy.mechanism",
        )
    if method.rounds < 2:
        raise InputError(
            f"{where} it needs at least two rounds, but method.rounds is {method.rounds}", key="privacy.mechanism"
        )
    return period


def _noise_multiplier(name: str, method: Method[Any], privacy: PrivacySpec, rate: float, period: int) -> float:
    epsilon, delta = need(privacy.target_epsilon, "target_epsilon"), need(privacy.delta, "delta")
    rounds, releases = max(method.rounds, 1), len(method.means)
    if name == "distributed_gaussian":
        return noise_multiplier_for_concentrated(epsilon, delta, rounds * releases)
    if name == "correlated_gaussian":
        return noise_multiplier_for(epsilon, delta) * strategy(rounds, period).sensitivity()
    if rate < 1:
        return noise_multiplier_for(epsilon, delta, rounds, rate) * math.sqrt(releases)
    return noise_multiplier_for(epsilon, delta, rounds * releases)


def _resolving(aggregation: Secure, mechanism: CentralGaussian) -> Secure:
    """Secure aggregation whose fixed-point numbers can represent the lattice, and bounded updates with their noise."""
    faults = Faults()
    if aggregation.clip_norm is not None:
        faults.say(
            "aggregation.clip_norm: privacy.clip_norm already clips updates; drop it", key="aggregation.clip_norm"
        )
    if aggregation.compact:
        faults.say(
            "aggregation.compact: 32 bits cannot hold an update with its noise; drop it under [privacy]",
            key="aggregation.compact",
        )
    faults.refuse()
    z = mechanism.noise_multiplier
    noise = mechanism.clip_norm * z
    if mechanism.adaptive is not None:  # with n clients, the count's noise has at least n / 2 shares
        sigma_b = mechanism.adaptive.count_noise(_MOST_CLIENTS, z)
        noise = max(mechanism.adaptive.update_noise(z, z), z, sigma_b / math.sqrt(_MOST_CLIENTS / 2))
    found = replace(aggregation, bound=2.0 ** math.frexp(mechanism.clip_norm + _TAIL * noise)[1])
    if FixedPoint(64, found.bound, _MOST_CLIENTS).step > mechanism.step:
        raise InputError(f"privacy: noise of {z:.4g} clip_norm does not fit into 64 bits")
    return found
