"""Text from values and from other parties: strictly valid JSON, visible characters, safe file names."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote


def to_json(value: Any, *, indent: int | None = None, ascii: bool = False) -> str:
    """``value`` as JSON by RFC 8259, which has no NaN and no infinity: they become null.

    Args:
        value: made of mappings, lists, tuples, text, numbers, and scalars of NumPy and torch.
        ascii: whether to escape all characters that are not ASCII.

    Raises:
        TypeError: the value contains another type.

    Example:
        >>> to_json({"loss": float("inf"), "rounds": 3})
        '{"loss": null, "rounds": 3}'
    """
    try:
        return json.dumps(value, indent=indent, ensure_ascii=ascii, default=_scalar, allow_nan=False)
    except ValueError:  # NaN and infinity are rare; only a value with them is copied
        return json.dumps(finite(value), indent=indent, ensure_ascii=ascii, allow_nan=False)


def finite(value: Any) -> Any:
    """A copy in which NaN and infinity are None, scalars are Python numbers, and tuples are lists."""
    if isinstance(value, Mapping):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    return (value if math.isfinite(value) else None) if isinstance(value, float) else _scalar(value)


_DEEPEST = 64  # largest number of levels in the JSON of a run directory


def from_json(text: str | bytes) -> Any:
    """Parse JSON from a file that another party may have written.

    Raises:
        ValueError: it is not JSON, or nested so deeply that a recursive function would fail.

    Example:
        >>> from_json('{"rounds": 3}')
        {'rounds': 3}
    """
    brackets = text.count(b"{") + text.count(b"[") if isinstance(text, bytes) else text.count("{") + text.count("[")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    inner = [value] if brackets > _DEEPEST else []
    for _ in range(_DEEPEST):
        inner = [x for v in inner if isinstance(v, dict | list) for x in (v.values() if isinstance(v, dict) else v)]
    if inner:
        raise ValueError(f"nested in more than {_DEEPEST} levels")
    return value


def _scalar(value: Any) -> Any:
    if not hasattr(value, "item"):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


_UNSEEN = ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")  # control, bidirectional, surrogate, unassigned, line separators
_BLANK = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"  # blank characters whose category is letter, mark or symbol


def alike(name: str) -> str:
    """The name without differences of case and character width, which people and some file systems overlook.

    Example:
        >>> alike("North") == alike("\uff2eorth") == "north"
        True
    """
    return unicodedata.normalize("NFKC", name).casefold()


def visible(text: object) -> str:
    """The text with invisible and control characters, but not spaces, written as their codes."""
    return "".join(f"\\u{ord(c):04x}" if c in _BLANK or unicodedata.category(c) in _UNSEEN else c for c in str(text))


def visible_lines(text: object) -> str:
    """As :func:`visible`, but line feeds and tabs stay."""
    return "".join(c if c in "\n\t" else visible(c) for c in str(text))


# The form of names of silos and clients, which also name folders. Python and JSON Schema both read this syntax.
NAME = r"[^\W_][\w.-]{0,63}"
NAME_WORDS = 'letters, digits, "-", "_" and "." only, at most 64, the first one a letter or a digit'


def is_name(text: object) -> bool:
    """Whether a text is a valid name of a silo in ``silo.toml``, in a federation's file and at the server.

    Example:
        >>> is_name("hospital-a"), is_name("../a"), is_name("a" * 65)
        (True, False, False)
    """
    return isinstance(text, str) and len(text) <= 64 and re.fullmatch(NAME, text) is not None


def listing(names: Iterable[str], most: int = 12) -> str:
    """Names in quotes for a message: ``"a", "b", "c" and 4 more``."""
    names = list(names)
    shown = ", ".join(f'"{name}"' for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def several(word: str) -> str:
    """The plural of a noun such as "class" or "target"."""
    return f"{word}es" if word.endswith("s") else f"{word}s"


def complain(text: object) -> None:
    """Print one line on stderr, for use if no log can be written."""
    sys.stderr.write(f"fedfm: {visible(text)}\n")


_LONGEST = 255  # largest number of bytes of a file name


def safe_name(text: str) -> str:
    """A file name for an untrusted text, e.g. a client's name. Different texts get different names. A name
    has no separators, and does not consist of dots only.

    A name that is too long for a file system is cut and ends with "+" and a hash; no other file name contains "+".
    """
    name = quote(text, safe="", errors="surrogatepass")
    name = name if text.strip(".") else name.replace(".", "%2E")
    return name if len(name) <= _LONGEST else f"{name[:160]}+{hashlib.sha256(name.encode()).hexdigest()}"
