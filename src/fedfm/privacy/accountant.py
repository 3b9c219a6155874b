"""The privacy ledger: the epsilon of each release and of all releases together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedfm.errors import InputError


@dataclass(frozen=True)
class Spent:
    """The privacy that one mechanism spends on one unit.

    Attributes:
        mechanism: e.g. ``"Gaussian, analytic"``.
        unit: the guarantee hides the presence of one row (``"record"``) or of one client (``"client"``).
        relation: which data sets are neighbours: ``"add_remove"``, ``"replace"`` or ``"replace_any"``.
        epsilon: infinite if nothing is guaranteed.
        delta: fixed before the data are seen.
        sensitivity: largest L2 distance between the statistics of neighbours.
        sigma: standard deviation of the noise on these statistics. None if this is not one Gaussian release (e.g.
            the sampled steps of DP-SGD); such a release does not compose with other entries.
        composition: how the parts of the release compose, e.g. its rounds, or the classes of one client.
        note: further assumptions.
    """

    mechanism: str
    unit: str
    relation: str
    epsilon: float
    delta: float
    sensitivity: float
    sigma: float | None
    composition: str
    note: str


def together(spent: Sequence[Spent]) -> Spent:
    """Composition of Gaussian releases, e.g. of two clients or several rounds, about a record that is in all of them.

    It is exact: releases of sensitivity s_i under noise sigma_i equal one release of sensitivity
    sqrt(sum s_i^2/sigma_i^2) under noise 1 (Dong, Roth, Su 2022, Corollary 3.3). A later release may depend on an
    earlier one.

    Raises:
        InputError: there is no release, one of several is not Gaussian, or they differ in unit, relation or delta.

    Example:
        >>> one = Spent("Gaussian, analytic", "record", "add_remove", 1.0, 1e-5, 1.0, 3.730632, "", "")
        >>> round(together([one, one]).epsilon, 3)
        1.465
    """
    from fedfm.privacy import gaussian

    if not spent:
        raise InputError("nothing was spent: give at least one release")
    first = spent[0]
    for name in ("unit", "relation", "delta"):
        if len(values := {getattr(one, name) for one in spent}) > 1:
            raise InputError(f"releases of different {name} do not add up: {sorted(values)}; account them one by one")
    if len(spent) > 1 and (others := sorted({one.mechanism for one in spent if one.sigma is None})):
        raise InputError(f"releases of {', '.join(others)} do not add up with others: account them one by one")
    if first.sigma is None:
        return first
    ratio = math.hypot(*(one.sensitivity / one.sigma if one.sigma else math.inf for one in spent))
    unbounded = ratio == math.inf or any(one.epsilon == math.inf for one in spent)
    return replace(
        first,
        mechanism=" + ".join(dict.fromkeys(one.mechanism for one in spent)),
        epsilon=math.inf if unbounded else gaussian.epsilon_of(1.0, ratio, first.delta),
        sensitivity=ratio,
        sigma=1.0,
        composition=f"{len(spent)} Gaussian releases of one record, exact",
        note="; ".join(dict.fromkeys(one.note for one in spent if one.note)),
    )


class Accountant:
    """The releases that a run's method and its aggregation's mechanism make.

    Example:
        >>> accountant = Accountant()
        >>> accountant.compose(Spent("Gaussian, analytic", "record", "add_remove", 1.0, 1e-5, 1.0, 3.730632, "", ""))
        >>> accountant.epsilon
        1.0
    """

    def __init__(self) -> None:
        self._events: list[Spent] = []

    def compose(self, event: Spent) -> None:
        """Add one release."""
        self._events.append(event)

    @property
    def events(self) -> tuple[Spent, ...]:
        """All releases, in order."""
        return tuple(self._events)

    def entries(self) -> list[dict[str, Any]]:
        """The lines of the ledger, one for each release."""
        return [asdict(event) for event in self._events]

    @property
    def epsilon(self) -> float | None:
        """The epsilon of all releases together; None if nothing is claimed.

        Raises:
            InputError: the releases do not add up (see :func:`together`).
        """
        if len(self._events) > 1:
            return together(self._events).epsilon
        return self._events[0].epsilon if self._events else None
