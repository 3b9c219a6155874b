"""The settings of FedPFT, and which of them exclude each other, with and without [privacy]."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fedfm.core.fields import setting
from fedfm.errors import Faults, InputError
from fedfm.methods.fedpft.encoding import DTYPES
from fedfm.methods.fedpft.mixtures import COVARIANCES
from fedfm.methods.fedpft.release_plan import CALIBRATIONS, RELATIONS, Plan
from fedfm.methods.fedpft.summary import MOST
from fedfm.methods.fedpft.topology import topological
from fedfm.privacy.spec import PrivacySpec, need
from fedfm.training.fit_head import HeadSpec


@dataclass(frozen=True)
class Settings:
    """The settings of FedPFT."""

    rounds: int = setting(1, "1; 0 evaluates the start", ge=0, le=1, words="1, it takes one round")
    covariance: str | None = setting(
        None,
        "of a component: spherical, diag or full; under [privacy] spherical",
        choices=COVARIANCES,
        metadata={"usual": "diag"},
    )
    components: int | None = setting(
        None,
        "largest K; one component per ten examples of a class, none for a single example; under [privacy] 1",
        ge=1,
        metadata={"usual": 10},
    )
    budgets: dict[str, int] = setting(dict, "K of single clients by name", ge=1)
    transport: str = setting("float16", "of the numbers sent: float16 or float32", choices=tuple(DTYPES))
    topology: str = setting(
        "star", "star (one server), or chain, ring (as chain), dag", choices=("star", "chain", "ring", "dag")
    )
    edges: tuple[tuple[str, ...], ...] = setting((), 'of a dag: [["a", "b"], ["b", "c"]]')
    min_count: int = setting(5, "a class with fewer examples is withheld; under [privacy] noise decides", ge=1)
    samples: int = setting(0, "number of draws from each mixture; 0: the class's number of examples", ge=0, le=MOST)
    shuffle: bool = setting(False, "drop the senders of mixtures (Appendix A.3)")
    counts: str = setting(
        "exact", "of classes: exact; withheld: not sent, only estimable (give samples)", choices=("exact", "withheld")
    )
    calibration: str = setting("analytic", "of private noise: analytic; paper, paper_client", choices=CALIBRATIONS)
    relation: str = setting("add_remove", "neighbours: add_remove, replace, replace_any", choices=RELATIONS)
    bound: bool = setting(False, "clients also send what Theorem 4.2 needs (the report shows it)")
    smoothing: float = setting(0.1, "of features in the bound, times their standard deviation", gt=0, finite=True)
    pooled: bool = setting(False, "private: one noisy sum over the federation, by a mean")
    verify: bool = setting(False, "clients count the head's errors in a second message")
    head: HeadSpec = setting(HeadSpec(), "how heads are trained")


def refuse(m: Settings) -> None:
    """Refuse settings that conflict.

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
    """Whether FedPFT could use ``pooled = true`` under [privacy] and does not."""
    return bool(not m.pooled and m.topology == "star" and m.calibration == "analytic")


def plan_of(m: Settings, privacy: PrivacySpec) -> Plan:
    """What FedPFT releases under the [privacy] table.

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
