"""Notices about names of classes or clients that are probably different spellings of one name, or mean "none"."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal, InvalidOperation

from fedfm.core.text import several
from fedfm.data.invisible import escape, is_invisible


def _fold_case(name: str) -> str:
    return " ".join(name.casefold().split())


def _normalise(name: str) -> str:
    return _fold_case(unicodedata.normalize("NFKC", _visible(name)))


def _visible(name: str) -> str:
    """The name without invisible characters: zero-width spaces, joiners, soft hyphens, byte order marks."""
    return "".join(c for c in name if not is_invisible(c))


def _decode_again(name: str) -> str:
    """The name as it was before its UTF-8 bytes were read as Windows-1252 or Latin-1: "café" for "cafÃ©"."""
    for encoding in ("cp1252", "latin-1"):
        try:
            return name if name.isascii() else name.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
    return name


def _number(name: str) -> Hashable:
    """The name as a number if it is one, else the name: tables with empty cells write 1 as 1.0."""
    try:
        found = Decimal(name.strip())
    except InvalidOperation:
        return name
    return found if found.is_finite() and "_" not in name else name


def _truth(name: str) -> Hashable:
    """The name as a truth value if it is one, else the name: pandas, JSON and spreadsheets write true differently."""
    for number, words in enumerate((("false", "no"), ("true", "yes"))):
        if name.strip().casefold() in words or _number(name) == number:
            return number
    return name


def _without_marks(name: str) -> Hashable:
    # A number keeps its sign, since -1 is not 1.
    return _normalise(name.replace("-", " ").replace("_", " ")) if isinstance(_number(name), str) else name


# How two spellings that may be one class differ -> a function that makes them equal. The first match is reported.
_ALIKE: dict[str, Callable[[str], Hashable]] = {
    "case or spaces": _fold_case,
    "invisible characters": lambda name: _fold_case(_visible(name)),
    "the form of their Unicode characters": _normalise,
    "-, _, spaces or case": _without_marks,
    "bytes that were read in another encoding": _decode_again,
    "how they write a number": _number,
    "how they write true and false": _truth,
}
# How programs write that there is no label: tables, spreadsheets after a failed formula, and numeric files
_NO_LABEL = (
    *("nan", "none", "null", "na", "n/a", "<na>", "#n/a", "?", "-", ".", "missing", "unlabeled", "unlabelled"),
    *("#ref!", "#value!", "#div/0!", "#name?", "#num!", "#null!", "-99", "-999", "-9999"),
)


def spellings(names: Sequence[str], of: str = "class") -> list[str]:
    """Notices if names of classes differ only by case, spaces, marks or Unicode forms, or if a name means "none".

    Args:
        of: what has these names, such as "class", "tag" or "client".

    Example:
        >>> spellings(["sports", "Sports ", "world"])
        ['the classes "Sports " and "sports" differ only by case or spaces; if they are one class, spell them alike']
    """
    many = several(of)
    found, said = [], set[tuple[str, ...]]()
    for how, key in _ALIKE.items():
        alike: dict[Hashable, list[str]] = {}
        for name in sorted(names):
            alike.setdefault(key(name), []).append(name)
        groups = [tuple(some) for some in alike.values() if len(some) > 1 and tuple(some) not in said]
        said.update(groups)
        if groups:
            listed = "; ".join(" and ".join(map(escape, some)) for some in groups)
            found.append(f"the {many} {listed} differ only by {how}; if they are one {of}, spell them alike")
    empty = [f'"{name}"' for name in sorted(names) if name.strip().casefold() in _NO_LABEL]
    if empty and len(names) > len(empty):
        what = f"the {of} {empty[0]} is" if len(empty) == 1 else f"the {many} {' and '.join(empty)} are"
        of_rows = "a label" if of == "class" else f"a {of}"
        found.append(f"{what} trained like any other; if it marks rows without {of_rows}, remove these rows")
    return found
