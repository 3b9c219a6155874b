"""Refuse settings of FedPFT that exclude each other, with and without [privacy]."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from fedfm.errors import Faults, InputError
from fedfm.methods.fedpft.release_plan import Plan
from fedfm.methods.fedpft.topology import topological
from fedfm.privacy.spec import PrivacySpec, need


class Settings(Protocol):
    """Those of a FedPFT that are compared here."""

    @property
    def topology(self) -> str: ...
    @property
    def edges(self) -> Sequence[tuple[str, ...]]: ...
    @property
    def counts(self) -> str: ...
    @property
    def samples(self) -> int: ...
    @property
    def min_count(self) -> int: ...
    @property
    def covariance(self) -> str | None: ...
    @property
    def components(self) -> int | None: ...
    @property
    def budgets(self) -> Mapping[str, int]: ...
    @property
    def calibration(self) -> str: ...
    @property
    def relation(self) -> str: ...
    @property
    def pooled(self) -> bool: ...
    @property
    def shuffle(self) -> bool: ...
    @property
    def bound(self) -> bool: ...
    @property
    def verify(self) -> bool: ...


def refuse(m: Settings) -> None:
    """Refuse settings of a FedPFT ``m`` that conflict.

    Raises:
        InputError: it names the key and a valid value.
    """
    if m.counts == "withheld":
        _refuse_counting(m)
    if (m.topology == "dag") != bool(m.edges):
        raise InputError('method.edges goes with topology = "dag", and a dag needs them', key="method.edges")
    if m.shuffle and (m.topology != "star" or m.bound):
        raise InputError('method.shuffle: only with topology = "star" and without bound', key="method.shuffle")
    if m.bound and m.topology != "star":
        raise InputError(f'method.bound: only with topology = "star", not "{m.topology}"', key="method.bound")
    if any(len(edge) != 2 for edge in m.edges):
        raise InputError('method.edges: expected pairs of names, e.g. [["a", "b"]]', key="method.edges")
    names = {name for edge in m.edges for name in edge}
    topological({n: [a for a, b in m.edges if b == n] for n in names})


def _refuse_counting(m: Settings) -> None:
    """Refuse settings that would reveal the counts."""
    if not m.samples or m.topology != "star" or m.bound:
        raise InputError(
            'method.samples: counts = "withheld" needs a number to draw, topology "star" and no bound',
            key="method.samples",
        )
    if m.verify:
        raise InputError(
            'method.verify: clients send their numbers of rows; with counts = "withheld" drop it', key="method.verify"
        )
    if m.covariance == "full":
        raise InputError(
            'method.covariance = "full": the rank of a covariance matrix reveals the number of rows; with '
            'counts = "withheld" expected spherical, diag',
            key="method.covariance",
        )
    if m.min_count < 2:
        raise InputError(
            f"method.min_count = {m.min_count}: a class of one row has no variance, which reveals it; with "
            'counts = "withheld" expected at least 2',
            key="method.min_count",
        )


def pools(m: Settings) -> bool:
    """Whether this FedPFT could use ``pooled = true`` under [privacy] and does not."""
    return bool(not m.pooled and m.topology == "star" and m.calibration == "analytic")


def plan_of(m: Settings, privacy: PrivacySpec) -> Plan:
    """What a FedPFT ``m`` releases under the [privacy] table.

    Raises:
        InputError: a guarantee that cannot be given, with the key and what would be right.
    """
    faults = Faults()
    if privacy.mechanism not in (None, "gaussian"):
        faults.say(f'privacy.mechanism = "{privacy.mechanism}": fedpft has "gaussian"', key="privacy.mechanism")
    if privacy.unit != "record":
        faults.say(f'privacy.unit = "{privacy.unit}": fedpft protects a "record"', key="privacy.unit")
    star = m.topology == "star"  # elsewhere each client's own release has one component, and refits cost nothing
    if m.pooled and not star:
        faults.say(
            f'method.pooled: one sum over the federation needs topology "star", not "{m.topology}"', key="method.pooled"
        )
    if m.calibration == "paper_client" and not star:
        faults.say(
            f'method.calibration = "paper_client": only with topology "star", not "{m.topology}"',
            key="method.calibration",
        )
    if m.pooled and m.calibration != "analytic":
        faults.say(
            f'method.calibration = "{m.calibration}": one sum over the federation has "analytic"',
            key="method.calibration",
        )
    if star and m.components != 1:
        faults.say(
            f'method.components = {m.components}: expected 1 under [privacy] with topology "star"',
            key="method.components",
        )
    if star and m.budgets:
        faults.say("method.budgets: a class has one component under [privacy]; drop it", key="method.budgets")
    if m.bound or m.verify:
        faults.say(
            "method.bound and method.verify reveal what is not accounted for: drop them under [privacy]",
            key="method.bound",
        )
    if m.shuffle:
        faults.say("method.shuffle: noisy sums come with their sender; under [privacy] drop it", key="method.shuffle")
    if m.counts == "withheld":
        faults.say(
            'method.counts = "withheld": under [privacy] each class has its count, noisy but for "replace"',
            key="method.counts",
        )
    faults.refuse()
    epsilon, delta = need(privacy.target_epsilon, "target_epsilon"), need(privacy.delta, "delta")
    return Plan(m.relation, m.covariance or "spherical", epsilon, delta, m.calibration)


def check_budgets(budgets: Collection[str], clients: Sequence[str]) -> None:
    """Refuse budgets of a client that is not there.

    Raises:
        InputError: with its name.
    """
    if strangers := sorted(set(budgets) - set(clients)):
        text = f'method.budgets: "{strangers[0]}" is none of the clients {", ".join(clients)}'
        raise InputError(text, key="method.budgets")
