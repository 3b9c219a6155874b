r"""Normalise class names: two names that look the same are one class.

Invisible characters are removed, every kind of space becomes an ordinary space, and characters are composed (Unicode
NFC, since macOS decomposes file names). Joiners and variation selectors next to non-ASCII characters are kept, since
some scripts and emoji need them. Upper and lower case are kept.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from fedfm.data.invisible import FORMS, escape, is_invisible
from fedfm.errors import InputError

_JOINERS = "\u200c\u200d"
_ASCII = 0x80
_BLANKS = " \t\r\n"
_NAMED = 3  # largest number of names that a notice lists


def class_name(text: str) -> str:
    r"""Return the normal form of a class name.

    Example:
        >>> class_name(" lung\u200b"), class_name("small\u00a0cell"), class_name("e\u0301")
        ('lung', 'small cell', 'é')
    """
    if text.isascii() and text.isprintable():
        return text.strip()
    shown = unicodedata.normalize("NFC", text)
    kept = (c for i, c in enumerate(shown) if not is_invisible(c) or _joins(shown, i))
    return "".join(" " if unicodedata.category(c) == "Zs" else c for c in kept).strip()


def notices_of(texts: Iterable[str], name: str) -> tuple[str, ...]:
    """Notices about labels that normalisation changed; blanks at the ends count only if it joins two spellings.

    Args:
        texts: the label of each row.
        name: the column's name.
    """
    counts = Counter(texts)
    found = []
    if changed := [text for text in counts if class_name(text) != text.strip(_BLANKS)]:
        shown = ", ".join(f"{escape(text)} as {escape(class_name(text))}" for text in sorted(changed)[:_NAMED])
        found.append(
            f'{sum(counts[text] for text in changed)} of {counts.total()} labels in "{name}" contain invisible or '
            f"indistinguishable characters and are normalised: {shown}{_more(changed)}"
        )
    ends = Counter(text.strip(_BLANKS) for text in counts)
    if joined := sorted(text for text, count in ends.items() if count > 1):
        shown = ", ".join(map(escape, joined[:_NAMED]))
        found.append(
            f'labels in "{name}" that differ only by blanks at their ends are one class: {shown}{_more(joined)}'
        )
    return tuple(found)


def _more(texts: Sequence[str]) -> str:
    return f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""


def names_of(texts: Sequence[str], what: str) -> tuple[str, ...]:
    """Normalise a list of class names; a name's index in the list is the number of its class.

    Raises:
        InputError: a name is empty, or two are the same.
    """
    names = tuple(map(class_name, texts))
    for name, count in Counter(names).items():
        if not name or count > 1:
            alike = " and ".join(escape(text) for text in texts if class_name(text) == name)
            raise InputError(f"{what}: class names must be different and not empty, but {alike} are not")
    return names


def check_list(texts: Sequence[str], key: str) -> None:
    """Raise an InputError if a class name is not in its normal form, or occurs twice."""
    for text in texts:
        if (name := class_name(text)) != text:
            raise InputError(
                f"{key}: {escape(text)} is read as {escape(name)} in the rows: write it in that form", key=key
            )
    if len(set(texts)) != len(texts):
        raise InputError(f"{key}: a name occurs twice", key=key)


def _joins(text: str, i: int) -> bool:
    """Whether character ``i`` is a joiner or a variation selector that its neighbours need, as in Persian and emoji."""
    before = text[i - 1] if i else " "
    if text[i] in FORMS:
        return ord(before) >= _ASCII and not before.isspace()
    after = text[i + 1] if i + 1 < len(text) else " "
    return text[i] in _JOINERS and all(
        ord(c) >= _ASCII and not c.isspace() and not is_invisible(c) for c in (before, after)
    )
