"""Notices about names of classes or clients that are probably different spellings of one name, or mean "none"."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal, InvalidOperation

from fedfm.core.text import several
from fedfm.data.invisible import escape, is_invisible

# Cyrillic and Greek letters that look like Latin ones -> these
_LATIN = str.maketrans(
    "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0406\u0408\u0405\u0430\u0435\u043e\u0440\u0441"
    "\u0443\u0445\u0456\u0458\u0455\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u03bf",
    "ABEKMHOPCTYXIJSaeopcyxijsABEZHIKMNOPTYXo",
)
_LETTERS = {"y": "yes", "n": "no", "t": "true", "f": "false"}
_ENDS = " '\"`.,;:!?()\u2018\u2019\u201c\u201d"


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


def _without_ends(name: str) -> Hashable:
    return name if isinstance(_number(name), Decimal) else _fold_case(name.strip(_ENDS)) or name


# How two spellings that may be one class differ -> a function that makes them equal. The first match is reported.
_ALIKE: dict[str, Callable[[str], Hashable]] = {
    "case or spaces": _fold_case,
    "invisible characters": lambda name: _fold_case(_visible(name)),
    "the form of their Unicode characters": _normalise,
    "-, _, spaces or case": _without_marks,
    "marks at their ends": _without_ends,
    "letters of other alphabets that look alike": lambda name: _fold_case(name.translate(_LATIN)),
    "bytes that were read in another encoding": _decode_again,
    "how they write a number": _number,
    "how they write true and false": _truth,
    "an abbreviation": lambda name: _LETTERS.get(name.strip().casefold(), _fold_case(name)),
}
# How programs write that there is no label: tables, spreadsheets after a failed formula, and numeric files
_NO_LABEL = (
    *("nan", "none", "null", "na", "n/a", "<na>", "#n/a", "?", "-", ".", "missing", "unlabeled", "unlabelled"),
    "\\n",  # \N, as MySQL writes an empty cell, in lower case
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
