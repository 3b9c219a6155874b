"""Format text and numbers for people: escape text, and choose units.

Names of clients, classes and files are not trusted. So text of a run is written to a terminal only through
:func:`visible`, and to a page only through :func:`esc`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from html import escape
from typing import TypeGuard

from fedfm.core.text import visible

NBSP = "\N{NO-BREAK SPACE}"
NONE = "\N{EN DASH}"  # shown for a missing value


def esc(text: object) -> str:
    """Escape text for use in an element or in a double-quoted attribute, in HTML and in XML."""
    return escape(visible(text), quote=True)


def width_of(text: str) -> int:
    """The columns of a text in a fixed-width font: 2 for a wide East Asian character, 0 for a combining one."""
    return sum(map(_columns, visible(text)))


def _columns(character: str) -> int:
    wide = unicodedata.east_asian_width(character) in "WF"
    return 0 if unicodedata.combining(character) else 2 if wide else 1


def shorten(text: object, columns: int) -> str:
    """The text; if it is wider than ``columns``, it is cut and ends with an ellipsis."""
    width, kept = 0, 0  # columns so far; characters that fit before an ellipsis
    text = visible(text)
    for at, character in enumerate(text):
        width += _columns(character)
        if width > columns:
            return text[:kept].rstrip() + "\N{HORIZONTAL ELLIPSIS}"
        if width <= columns - 1:
            kept = at + 1
    return text


def finite(value: float | None) -> TypeGuard[float]:
    """Whether the value is a finite number."""
    return value is not None and math.isfinite(value)


def numbers(values: Iterable[float | None]) -> list[float]:
    """The finite values."""
    return [v for v in values if finite(v)]


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction as a percentage: ``0.8421`` as ``84.2 %``."""
    return f"{100 * value:.{digits}f}{NBSP}%" if finite(value) else number(value)


def number(value: float | None) -> str:
    """The value with four significant digits."""
    if value is None:
        return NONE
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "minus infinite"
    if value == int(value) and abs(value) < 1e15:
        return count(int(value))
    return f"{value:.4g}"


def count(value: int) -> str:
    """A whole number with narrow no-break spaces between thousands."""
    return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def size(value: float | None) -> str:
    """Bytes in decimal units, e.g. ``1.23 MB``."""
    if not finite(value):
        return number(value)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{NBSP}{unit}"


def duration(seconds: float | None) -> str:
    """Seconds in suitable units: ``0.42 s``, ``12.3 s``, ``4 min 05 s``, ``2 h 13 min``."""
    if not finite(seconds):
        return number(seconds)
    if seconds < 59.95:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f}{NBSP}s"
    if seconds < 3599.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}{NBSP}min {rest:02d}{NBSP}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}{NBSP}h {minutes:02d}{NBSP}min"


def plural(n: int, one: str, many: str = "") -> str:
    """A count and a noun, e.g. ``1 round`` or ``2 rounds``."""
    return f"{count(n)}{NBSP}{one if n == 1 else many or one + 's'}"
