"""The client halves (``@on_client`` functions) that answer in a run, and the kinds of message that each answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from fedfm.core.method import Method


def kinds(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the kinds of message that a client half answers, from its decorator or else from its method's lists.

    A half that its method lists neither in ``means`` nor in ``asks`` answers nothing. A method that has no lists, which
    a user's own may be, calls each half by both verbs.
    """
    of: Any = fn.__self__  # type: ignore[attr-defined]
    own: str = fn.kind  # type: ignore[attr-defined]
    if not isinstance(of, Method):
        return (own or "query",)
    if not any(key in vars(cls) for cls in type(of).__mro__ if cls is not Method for key in ("means", "asks")):
        return (own,) if own else ("train", "query")
    listed = tuple(kind for kind, names in (("train", of.means), ("query", of.asks)) if fn.__name__ in names)
    return (own,) if own and listed else listed


def handlers(*parts: Any) -> Iterator[Callable[..., Any]]:
    """Yield the ``@on_client`` functions of ``parts``, and of the methods in the parts' fields."""
    for part in parts:
        for name in dir(type(part)):
            if getattr(inspect.getattr_static(type(part), name, None), "on_client", False):
                yield getattr(part, name)
        if isinstance(part, Method):
            yield from handlers(*(v for v in vars(part).values() if isinstance(v, Method)))
