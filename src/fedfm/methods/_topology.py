"""Who hears whom in a decentralised run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedfm.errors import InputError
from fedfm.federation import ClientId


def topological(parents: Mapping[ClientId, Sequence[ClientId]]) -> list[ClientId]:
    """Every client after its parents, in order of names where that leaves a choice.

    Raises:
        InputError: there is a cycle.
    """
    done: list[ClientId] = []
    left = sorted(parents)
    while left:
        ready = [c for c in left if all(p in done for p in parents[c])]
        if not ready:
            raise InputError(f"method.edges: {', '.join(left)} form a cycle")
        done.append(ready[0])
        left.remove(ready[0])
    return done
