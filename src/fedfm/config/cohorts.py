"""Rules on the number and names of the clients that an experiment needs in the federation.

A command checks these rules as soon as the names are known. If a kit of silo files, a roster or the data contain the
names, this is before the run; otherwise it is after the first messages of the clients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from fedfm.config.parts import ExperimentParts
from fedfm.config.registry import name_of
from fedfm.core.method import fraction_of
from fedfm.errors import InputError, close


def enough(e: ExperimentParts, names: Sequence[str], source: str = "") -> None:
    """Refuse an experiment that needs more clients than the federation has, or names a client that is not in it.

    Args:
        names: all possible clients.
        source: where the names come from, for the message; "" if the clients are connected.

    Raises:
        InputError: the message names the required number of clients, or the unknown client.
    """
    clients = len(names)
    there = f"{source} has {_silos(clients)}" if source else f"there are {clients} clients"
    of = f"{_silos(clients)} of {source}" if source else f"{clients} clients"
    fraction = fraction_of(e.method)
    cohort, least = max(math.floor(fraction * clients + 1e-9), 1), e.aggregation.least()
    asks = f"a round asks {cohort} of {of}" if cohort < clients else there
    if e.run.min_clients is not None and e.run.min_clients > cohort and not e.method.needs.pooled:
        raise InputError(f"run.min_clients = {e.run.min_clients}: {asks}", key="run.min_clients")
    late = e.run.asynchronous
    if late is not None and late.buffer > clients:
        raise InputError(f"run.asynchronous.buffer = {late.buffer}: {there}", key="run.asynchronous.buffer")
    if late is not None:
        named_clients(late.speeds, names)
    if cohort < least:
        from fedfm.aggregation.secure import Secure

        if isinstance(e.aggregation, Secure):
            key, value = ("privacy.aggregator", "secagg") if e.privacy is not None else ("aggregation.name", "secure")
            raise InputError(
                f'{key} = "{value}": it needs {least} clients per round, since in a sum of two each knows the '
                f"other's update, and a round asks {cohort} of {of}; {_cure(least, clients)}, or drop it",
                key=key,
            )
        raise InputError(
            f'aggregation.name = "{name_of("aggregation", e.aggregation)}": it needs {least} updates per round, and a '
            f"round asks {cohort} of {of}; {_cure(least, clients)}, or take another rule",
            key="aggregation.name",
        )
    mechanism = e.aggregation.mechanism
    if mechanism.period > clients:
        raise InputError(
            f"method.fraction = {fraction:g}: {mechanism.period} groups of clients take turns, and {there}; "
            f"expected at least {1 / clients:.3g}",
            key="method.fraction",
        )


def named_clients(speeds: Mapping[str, float], names: Collection[str]) -> None:
    """Refuse ``run.asynchronous.speeds`` for a client that does not exist.

    Raises:
        InputError: clients do not exist; the message has their names.
    """
    if unknown := sorted(speeds.keys() - set(names)):
        hint = close(unknown[0], names) if len(unknown) == 1 else ""
        raise InputError(
            f"run.asynchronous.speeds: no client is called {', '.join(unknown)}{hint}", key="run.asynchronous.speeds"
        )


def _cure(least: int, clients: int) -> str:
    if clients < least:
        return f"give the federation at least {least} silos"
    return f"a method.fraction of at least {math.ceil(1000 * least / clients) / 1000:g} asks that number"


def _silos(count: int) -> str:
    return f"{count} silo" if count == 1 else f"{count} silos"
