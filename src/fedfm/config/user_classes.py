"""What a user's own method, attack or aggregation lacks; imported only if there is one."""

from __future__ import annotations

from typing import Any


def lacks(cls: Any) -> str:
    """What a user's class lacks; empty if it has all that fedfm calls."""
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        return f"{cls.__name__} lacks {', '.join(missing)}"
    for fact in ("means", "asks"):
        names = getattr(cls, fact, ())
        for handler in names if isinstance(names, tuple) else ():
            if not getattr(getattr(cls, handler, None), "on_client", False):
                return (
                    f'{cls.__name__}.{fact} names "{handler}", and the class has no function {handler} with @on_client'
                )
    return ""
