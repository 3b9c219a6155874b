"""Lists of many names in short form: names that differ only in a running number are written as [first, last]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MOST = 10**7  # largest number of names that a list from a file may stand for
_DIGITS = "0123456789"
_LONGEST = 18  # largest number of digits of a running number


def shorten(names: Iterable[str]) -> list[str | list[str]]:
    """The names in short form, in the same order.

    Example:
        >>> shorten(["client-08", "client-09", "client-10", "mercy", "client-12"])
        [['client-08', 'client-10'], 'mercy', 'client-12']
    """
    found: list[list[str]] = []
    after = ""  # the name that would continue the last range
    for name in names:
        if name == after:
            found[-1][1:] = [name]
        else:
            found.append([name])
        stem = name.rstrip(_DIGITS)
        digits = name[len(stem) :]
        after = f"{stem}{int(digits) + 1:0{len(digits)}d}" if digits and len(digits) <= _LONGEST else ""
        after = after if len(after) == len(name) else ""
    return [part[0] if len(part) == 1 else part for part in found]


def expand(parts: Any) -> list[str]:
    """The names that :func:`shorten` has shortened.

    Raises:
        ValueError: it is no such list.

    Example:
        >>> expand([["client-08", "client-10"], "mercy"])
        ['client-08', 'client-09', 'client-10', 'mercy']
    """
    if not isinstance(parts, list):
        raise ValueError("expected a list of names")
    names: list[str] = []
    for part in parts:
        if isinstance(part, str):
            names.append(part)
            continue
        first, last = part if isinstance(part, list) and len(part) == 2 else ("", "")
        stem = first.rstrip(_DIGITS) if isinstance(first, str) and isinstance(last, str) else ""
        low, high = (name[len(stem) :] if isinstance(name, str) else "" for name in (first, last))
        alike = last == f"{stem}{high}" and len(low) == len(high) <= _LONGEST
        if not (alike and low and high.isascii() and high.isdecimal() and int(low) < int(high)):
            raise ValueError(f"{part!r} is not a range of names")
        if len(names) + int(high) - int(low) > MOST:
            raise ValueError(f"more than {MOST} names")
        names += [f"{stem}{k:0{len(low)}d}" for k in range(int(low), int(high) + 1)]
    return names
