"""A client's one private release of its rows in a run."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from fedfm.core.client import Client
from fedfm.errors import Faults, RowsChanged
from fedfm.privacy import plausibility
from fedfm.privacy.accountant import Spent
from fedfm.privacy.noise import digest
from fedfm.privacy.spec import PrivacySpec


def key_of_release(client: Client, title: str, x: NDArray[Any], y: NDArray[Any], plan: str, delta: float) -> bytes:
    """The key of the noise on a release of the rows x (n, d) and their targets y, which a client may release once.

    Args:
        title: the method's name in the messages; in lower case it names the release in the client's store.
        plan: the public part of the release.
        delta: the delta of the release; a notice says if this delta makes the guarantee weak.

    Raises:
        RowsChanged: the client has released other rows, or by another plan, earlier in this run.
    """
    mark = digest(x, y, plan).encode()
    if client.write_once(title.lower(), mark) != mark:
        raise RowsChanged(
            f"{title}: this run has already released sums of different rows; another release would spend privacy that "
            "is not accounted. Put the rows back, or start a new run",
        )
    if notice := plausibility.of_delta(delta, len(y), "training rows of this client"):
        client.log(notice)
    return client.secret("noise")


def check_sums(privacy: PrivacySpec, name: str, faults: Faults) -> None:
    """Note the settings of [privacy] that one noisy sum of each client, or shares of its noise, cannot fulfil."""
    if privacy.mechanism not in (None, "gaussian", "distributed_gaussian"):
        faults.say(
            f'privacy.mechanism = "{privacy.mechanism}": {name} has "gaussian" and "distributed_gaussian"',
            key="privacy.mechanism",
        )
    if privacy.unit != "record":
        faults.say(f'privacy.unit = "{privacy.unit}": {name} protects a "record"', key="privacy.unit")


def spent_by_sums(name: str, epsilon: float, delta: float, sensitivity: float, sigma: float, *, shared: bool) -> Spent:
    """The ledger's entry of one noisy sum of each client.

    Args:
        sensitivity, sigma: of the sum, for one row more or less.
        shared: whether the clients add shares of the noise to a hidden sum, instead of all of it to their own.
    """
    alone = "one release of one client; a record at several clients spends at each of them"
    hidden = "one sum over all clients; a record at several clients changes it more than once"
    note = "against a server that follows the protocol, too; c clients that tell it their noise take c shares"
    return Spent(
        mechanism=f"Gaussian, {name}, by the clients" if shared else f"Gaussian, {name}",
        unit="record",
        relation="add_remove",
        epsilon=epsilon,
        delta=delta,
        sensitivity=sensitivity,
        sigma=sigma,
        composition=hidden if shared else alone,
        note=note if shared else "",
    )
