"""What is written for others to read: JSON that every reader takes, and text in which nothing acts unseen."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Mapping
from typing import Any


def to_json(value: Any, *, indent: int | None = None, ascii: bool = False) -> str:
    """``value`` as JSON by RFC 8259, which has no NaN and no infinity: they become null.

    Args:
        value: of mappings, lists, tuples, text, numbers and NumPy's and torch's scalars.
        ascii: write other characters as escapes.

    Raises:
        TypeError: it holds something else.

    Example:
        >>> to_json({"loss": float("inf"), "rounds": 3})
        '{"loss": null, "rounds": 3}'
    """
    try:
        return json.dumps(value, indent=indent, ensure_ascii=ascii, default=_scalar, allow_nan=False)
    except ValueError:  # seldom: only then a copy
        return json.dumps(finite(value), indent=indent, ensure_ascii=ascii, allow_nan=False)


def finite(value: Any) -> Any:
    """A copy in which NaN and infinity are None, scalars Python's and tuples lists."""
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    return (value if math.isfinite(value) else None) if isinstance(value, float) else _scalar(value)


def _scalar(value: Any) -> Any:
    if not hasattr(value, "item"):
        raise TypeError(f"{type(value).__name__} in a log")
    value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


_UNSEEN = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")  # control, bidirectional, surrogate, unassigned, separators of lines
_BLANK = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"  # by category letters, marks or symbols, and yet nothing


def visible(text: object) -> str:
    """The text with every character that could act unseen, or shows nothing though no space, written as its code."""
    return "".join(f"\\u{ord(c):04x}" if c in _BLANK or unicodedata.category(c) in _UNSEEN else c for c in str(text))


def visible_lines(text: object) -> str:
    """As :func:`visible`, of a text of several lines or columns: line feeds and tabs stay."""
    return "".join(c if c in "\n\t" else visible(c) for c in str(text))
