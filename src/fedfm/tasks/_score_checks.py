"""Check that scores and sums from a client are possible, before they are added to those of other clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedfm.core.metric_names import ACCURACY, BALANCED_ACCURACY, MACRO_F1
from fedfm.errors import E_FIELD, ClientFault

_MOST = 10**9  # largest number of rows of a client
_SLACK = 1e-3  # a rounded share may exceed 1 by at most this


def check_numbers(scores: Mapping[str, Any], sizes: Mapping[str, int], sums: Iterable[str]) -> None:
    """Check that n and the lengths of lists are right and no sum is negative; absent values are not checked.

    Args:
        sizes: the expected number of entries of each list, by the list's name.
        sums: names of the sums that are never negative.

    Raises:
        ClientFault: a value fails the check; the fault's code is E_FIELD.
    """
    if not 0 <= scores.get("n", 0) <= _MOST:
        raise ClientFault(E_FIELD, f"n is {scores['n']:g}: expected a number of rows")
    for name, size in sizes.items():
        found = scores.get(name)
        if found is not None and len(found) != size:
            raise ClientFault(E_FIELD, f"{name} has {len(found)} entries: expected {size}")
    for name in sums:
        found = scores.get(name)
        if isinstance(found, int | float) and found < 0:
            raise ClientFault(E_FIELD, f"{name} is {found:g}: expected a sum that is not negative")


def check_shares(
    scores: Mapping[str, Any],
    drawn: Iterable[str],
    sums: Iterable[str],
    figures_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> None:
    """Check that shares are from 0 to 1: the shares that the client sent, and those computed from its sums.

    Args:
        drawn: names of the task's own shares.
        sums: names of all sums.
        figures_of: computes the scores from sums.

    Raises:
        ClientFault: a share is outside this range; the fault's code is E_FIELD.
    """
    known = {name: scores.get(name) for name in sums}
    every = [scores]
    if any(value is not None for value in known.values()):
        # A share with divisor 0 is None and would pass, e.g. 5 right tags of 0 words; so sums of 0 are also tried as 1.
        every += [figures_of(known), figures_of({name: 1 if value == 0 else value for name, value in known.items()})]
    for figures in every:
        for name in (ACCURACY, BALANCED_ACCURACY, MACRO_F1, *drawn):
            share = figures.get(name)
            if share is not None and not 0 <= share <= 1 + _SLACK:
                raise ClientFault(E_FIELD, f"{name} is {share:g}: expected a number from 0 to 1")
