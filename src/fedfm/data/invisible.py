"""Detect invisible characters, and show them as codes."""

from __future__ import annotations

import unicodedata

FORMS = "".join(map(chr, range(0xFE00, 0xFE10)))  # variation selectors choose the form of the previous character
_BLANK = "\u115f\u1160\u3164\uffa0\u2800" + FORMS  # fillers and variation selectors


def is_invisible(c: str) -> bool:
    """Whether the character is invisible: zero-width space, joiner, soft hyphen, byte order mark or filler."""
    return not c.isspace() and (unicodedata.category(c) in ("Cf", "Cc") or c in _BLANK)


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: it has spaces and invisible characters only."""
    return all(c.isspace() or is_invisible(c) for c in text)


def escape(name: str) -> str:
    """The name in quotes; codes replace invisible and misleading characters."""
    odd = (is_invisible(c) or unicodedata.combining(c) or (c.isspace() and c != " ") for c in name)
    return '"' + "".join(f"\\u{ord(c):04x}" if is_odd else c for c, is_odd in zip(name, odd, strict=True)) + '"'
