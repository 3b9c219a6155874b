"""Which settings of FedPFT exclude each other, with and without [privacy]."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedfm.errors import Faults, InputError
from fedfm.methods.fedpft.topology import topological
from fedfm.privacy.spec import PrivacySpec


def check_topology(topology: str, edges: Sequence[Sequence[str]], *, shuffle: bool, bound: bool) -> None:
    """Refuse edges that do not form a directed acyclic graph, and settings that need a star.

    Raises:
        InputError: it names the key and a valid value.
    """
    if (topology == "dag") != bool(edges):
        raise InputError(
            'method.edges: topology = "dag" needs edges, and no other topology takes them', key="method.edges"
        )
    if shuffle and (topology != "star" or bound):
        raise InputError('method.shuffle: only with topology = "star" and without bound', key="method.shuffle")
    if bound and topology != "star":
        raise InputError(f'method.bound: only with topology = "star", not "{topology}"', key="method.bound")
    if any(len(edge) != 2 for edge in edges):
        raise InputError('method.edges: expected pairs of names, e.g. [["a", "b"]]', key="method.edges")
    names = {name for edge in edges for name in edge}
    topological({n: [a for a, b in edges if b == n] for n in names})


def check_withheld_counts(method: Mapping[str, Any]) -> None:
    """Refuse settings that would reveal the counts, for ``counts = "withheld"``.

    Args:
        method: the settings of the method by name.

    Raises:
        InputError: it names the key and a valid value.
    """
    if not method["samples"] or method["topology"] != "star" or method["bound"]:
        raise InputError(
            'method.samples: counts = "withheld" needs a number of draws, topology "star" and no bound',
            key="method.samples",
        )
    if method["verify"]:
        raise InputError(
            'method.verify: it makes clients send their numbers of rows; with counts = "withheld" drop verify',
            key="method.verify",
        )
    if method["covariance"] == "full":
        raise InputError(
            'method.covariance = "full": the rank of a covariance matrix reveals the number of rows; with '
            'counts = "withheld" expected spherical, diag',
            key="method.covariance",
        )
    if method["min_count"] < 2:
        raise InputError(
            f"method.min_count = {method['min_count']}: a class of one row has no variance, which reveals its size; "
            'with counts = "withheld" expected at least 2',
            key="method.min_count",
        )


def check_private(privacy: PrivacySpec, method: Mapping[str, Any]) -> None:
    """Refuse settings with which FedPFT cannot give the guarantee of the [privacy] table.

    Args:
        method: the settings of the method by name.

    Raises:
        InputError: all faults, each with the key and what would be right.
    """
    faults = Faults()
    if privacy.mechanism not in (None, "gaussian"):
        faults.say(f'privacy.mechanism = "{privacy.mechanism}": fedpft has "gaussian"', key="privacy.mechanism")
    if privacy.unit != "record":
        faults.say(f'privacy.unit = "{privacy.unit}": fedpft protects a "record"', key="privacy.unit")
    topology, calibration = method["topology"], method["calibration"]
    # Only a star limits the components. In other topologies clients fit any number of them to draws from a release.
    star = topology == "star"
    if method["pooled"] and not star:
        faults.say(
            f'method.pooled: one sum over the federation needs topology "star", not "{topology}"', key="method.pooled"
        )
    if calibration == "paper_client" and not star:
        faults.say(
            f'method.calibration = "paper_client": only with topology "star", not "{topology}"',
            key="method.calibration",
        )
    if method["pooled"] and calibration != "analytic":
        faults.say(
            f'method.calibration = "{calibration}": one sum over the federation needs "analytic"',
            key="method.calibration",
        )
    if star and method["components"] != 1:
        faults.say(
            f'method.components = {method["components"]}: expected 1 under [privacy] with topology "star"',
            key="method.components",
        )
    if star and method["budgets"]:
        faults.say("method.budgets: a class has one component under [privacy]; drop budgets", key="method.budgets")
    if method["bound"] or method["verify"]:
        faults.say(
            "method.bound and method.verify reveal more than the guarantee covers: drop them under [privacy]",
            key="method.bound",
        )
    if method["shuffle"]:
        faults.say(
            "method.shuffle: noisy sums come with their sender; under [privacy] drop shuffle", key="method.shuffle"
        )
    if method["counts"] == "withheld":
        faults.say(
            'method.counts = "withheld": under [privacy] clients send the count of each class, which has noise '
            'unless method.relation = "replace"; drop it',
            key="method.counts",
        )
    faults.refuse()


def check_budgets(budgets: Collection[str], clients: Sequence[str]) -> None:
    """Refuse budgets of clients that do not exist.

    Raises:
        InputError: there is such a budget; the message names the client.
    """
    if strangers := sorted(set(budgets) - set(clients)):
        text = f'method.budgets: "{strangers[0]}" is none of the clients {", ".join(clients)}'
        raise InputError(text, key="method.budgets")
