"""Notices about probable mistakes: label columns that hold no classes, texts that stand for empty cells, repeated
rows, test rows that are also training rows, images without content, numbers that stand for missing values.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np

from fedfm.core import tasks
from fedfm.core.text import listing
from fedfm.data import pixel_values, repetitions
from fedfm.data.partition import CLIENT
from fedfm.data.repeats import of_training_rows
from fedfm.data.table import Table, inputs_of

_TRUTH = {"true", "false", "yes", "no"}
_DATES = 2  # smallest number of different dates for a notice
_A_CLASS = 5  # with fewer rows per class on average, a class of one row says nothing
_MIXED = 2  # a notice needs at least this many numbers, and this many names, among the classes
_LONG_NAME = 200  # characters; a longer class name is probably a text
_MANY = 20  # 20 or more different numbers look like a quantity; among 20 or more rows, labels should recur
_MARKS = (";", "|", ",", "/", "+", "&", "\t", "\n", " and ", " ")  # separators of several labels in one cell
_AROUND = re.compile(r"^[\s$€£<>=~±]+|[\s%€$£°]+$|\s+[a-zA-Zµ/²³%]{1,6}$")  # signs and units around a number
_THOUSANDS = re.compile(r"[-+]?\d{1,3}([ ,.'])\d{3}(?:\1\d{3})*(?:(?!\1)[.,]\d+)?")
_DATE = re.compile(
    r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})(?:[ T]\d{1,2}:\d{2}\S*)?"
    r"|\d{1,2}:\d{2}(?::\d{2})?"
)
_EMPTY = ("nan", "<na>", "n/a", "#n/a", "null", "\\n")  # what tables write for an empty cell; MySQL writes \N
_SHORT = 16  # largest number of characters of a text that may stand for an empty cell
_TYPED, _LETTERS = 2, 5  # a misspelt class has at most 2 rows, and a name of at least 5 letters
_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec mrz mai okt dez".replace(" ", "|")
_REWRITTEN = re.compile(  # 1-Mar, Mar-01, 01. Mrz and 2.00E+05, as spreadsheets write MARCH1 and 2E5
    rf"\d{{1,2}}(?:-|\. ?)(?:{_MONTHS})|(?:{_MONTHS})-\d{{1,2}}|\d(?:[.,]\d+)?e\+\d{{2,}}", re.IGNORECASE
)
_WAY = "fedfm.federate with a module of your own (docs: how-to/own-model.md)"


def doubts(table: Table, label: str, images: np.ndarray | None = None) -> tuple[str, ...]:
    """All notices about probable mistakes.

    Args:
        label: name of the column of labels.
        images: the result of :func:`fedfm.data.thumbnails.figures` if the rows are images.
    """
    found = (
        _texts_as_classes(table, label),
        _quantities(table, label),
        _several(table, label),
        _unique(table, label),
        _numbers_and_names(table, label),
        _rewritten_names(table, label),
        _row_at_an_end(table),
        _misspelling(table),
        _empty_texts(table),
        _one_class_of_test(table),
        of_training_rows(table),
    )
    more = (*repetitions.notices(table), *pixel_values.notices(table, images), *of_features(table), *of_texts(table))
    return (*(text for text in found if text), *more)


def of_texts(table: Table) -> tuple[str, ...]:
    """Notices about texts; they need no labels."""
    if table.kind in ("image", "features"):
        return ()
    from fedfm.data import text_doubts

    return text_doubts.notices(table)


def of_features(table: Table) -> tuple[str, ...]:
    """Notices about feature vectors, for rows with or without labels."""
    if table.kind != "features":
        return ()
    from fedfm.data import feature_doubts

    return feature_doubts.notices(table)


def _texts_as_classes(table: Table, label: str) -> str | None:
    longest = max(map(len, table.classes), default=0)
    if longest <= _LONG_NAME:
        return None
    return f'a class name has {longest} characters: is data.label = "{label}" the column of the labels?'


def _quantities(table: Table, label: str) -> str | None:
    """A notice if labels are dates, or probably quantities: many numbers that do not simply count from 0 or 1."""
    if len(table.classes) >= _DATES and all(_DATE.fullmatch(name) for name in table.classes):
        return (
            f'column "{label}" holds {len(table.classes)} different dates or times, such as '
            f"{listing(table.classes[:2])}, and each becomes a class: is it the column of the labels?"
        )
    found = [_number(name) for name in table.classes]
    numbers = sorted(n for n in found if n is not None)
    if not numbers or len(numbers) < len(found):
        return None
    whole = all(n.is_integer() for n in numbers)
    bare = all(name.lstrip("-").isdigit() for name in table.classes)
    counted = bare and numbers[0] in (0, 1) and numbers[-1] - numbers[0] == len(numbers) - 1
    if counted or len(numbers) < (_MANY if whole else 3):
        return None
    return (
        f'column "{label}" holds {len(numbers)} different numbers from {numbers[0]:g} to {numbers[-1]:g}, and each '
        'becomes a class: if they are a quantity, set model.task = "regression"'
    )


def _number(name: str) -> float | None:
    """The number in a text, which may have thousands separators, a decimal comma, a unit or a sign."""
    plain = _AROUND.sub("", name.replace("\u2212", "-").replace("\u00a0", " "))
    parts = _THOUSANDS.fullmatch(plain)
    whole = plain.replace(parts[1], "") if parts else plain
    for text in (plain, whole.replace(",", ".")):
        try:
            value = float(text)
        except ValueError:
            continue
        return value if np.isfinite(value) else None
    return None


def _several(table: Table, label: str) -> str | None:
    """A notice about classes that combine other classes: "heart;lung" in addition to "heart" and "lung"."""
    names = [name for name in table.classes if _number(name) is None]  # 1,000 is one number
    for mark in _MARKS:
        parts = {name: [p.strip(" []'\"") for p in name.split(mark)] for name in names}
        count = Counter(part for some in parts.values() for part in set(some))
        made = [n for n, some in parts.items() if len(set(some)) > 1 and all(p and count[p] > 1 for p in some)]
        if mark == " ":  # "red apple" is one label although "red pear" and "green apple" exist
            made = [n for n in made if all(p in parts for p in parts[n])]
        if made:
            needs = "" if table.targets is not None else 'model.task = "multi_label" and '
            return (
                f"{len(made)} of {len(table.classes)} classes seem to combine several labels, such as "
                f"{listing(made[:2])}: each becomes a separate class; several labels per row need "
                f"{needs}data.label_separator = {json.dumps(mark)}"
            )
    return None


def _numbers_and_names(table: Table, label: str) -> str | None:
    """A notice if some classes are numbers and others are names, which happens when files are joined."""
    numbers = [name for name in table.classes if name.removeprefix("-").isdecimal()]
    names = [name for name in table.classes if _number(name) is None]
    if set(map(str.casefold, names)) <= _TRUTH:  # similar_names has a notice about them
        return None
    if CLIENT in table.columns or min(len(numbers), len(names)) < _MIXED:  # client_files has its own notice
        return None
    return (
        f'column "{label}" holds numbers, such as {listing(numbers[:2])}, and names, such as {listing(names[:2])}: '
        "each becomes a class; if the numbers stand for these names, write names in all rows"
    )


def _rewritten_names(table: Table, label: str) -> str | None:
    """A notice about names that a spreadsheet has turned into dates or numbers, as it does with those of genes."""
    found = [name for name in table.classes if _REWRITTEN.fullmatch(name)]
    if not found:
        return None
    return (
        f'column "{label}" holds {listing(found, 3)}: did a spreadsheet turn names, such as MARCH1 or 2E5, into dates '
        "or numbers? If so, restore the names"
    )


def _row_at_an_end(table: Table) -> str | None:
    """A notice about the first or last row of a file if it alone has its class, like a row of units or of totals."""
    if table.labels is None or table.kind in ("image", "features"):
        return None
    count = np.bincount(table.labels, minlength=len(table.classes))
    if len(table) < max(_MANY, _A_CLASS * len(table.classes)):
        return None
    owner = table.columns.get(CLIENT, np.zeros(len(table)))
    ends = np.flatnonzero(np.append(owner[1:] != owner[:-1], True))
    for rows, which in ((np.append(0, ends[:-1] + 1), "first"), (ends, "last")):
        if alone := [of for of in table.labels[rows].tolist() if count[of] == 1]:
            return (
                f'the {which} row of {table.source} alone has the class "{table.classes[alone[0]]}": is it a row of '
                "data, and not one of units, totals or comments?"
            )
    return None


def _unique(table: Table, label: str) -> str | None:
    if table.labels is None or len(table) < _MANY:
        return None
    there = len(np.unique(table.labels))
    if 2 * there <= len(table):
        return None
    return f'column "{label}" has {there} different labels in {len(table)} rows: is it the column of the classes?'


def _misspelling(table: Table) -> str | None:
    """A notice about a class of one or two rows if its name differs by one letter from the name of a frequent class."""
    if table.labels is None:
        return None
    count = np.bincount(table.labels, minlength=len(table.classes))
    common = [name for name, n in zip(table.classes, count, strict=True) if n >= _MANY]
    for name, n in zip(table.classes, count, strict=True):
        if not 0 < n <= _TYPED or len(name) < _LETTERS or not name.isalpha():
            continue
        if like := [other for other in common if other.isalpha() and _one_letter_apart(name, other)]:
            return f'the class "{name}" (rows: {n}) differs by one letter from "{like[0]}": is it the same class?'
    return None


def _one_letter_apart(one: str, other: str) -> bool:
    """Whether two words differ by one letter: added, left out, changed, or exchanged with the next."""
    short, long = sorted((one, other), key=len)
    start = next((i for i in range(len(short)) if short[i] != long[i]), len(short))
    a, b = short[start:], long[start:]
    if len(long) - len(short) == 1:
        return a == b[1:]
    return len(long) == len(short) and (a[1:] == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:]))


def _empty_texts(table: Table) -> str | None:
    """A notice about texts such as "nan", which tables write for an empty cell and which are read as words."""
    of = tasks.row_kind(table.kind)
    if not (table.kind == "text" or (of is not None and of.wording)):
        return None
    texts = (text for item in table.inputs for text in inputs_of(table.kind, item) if len(text) <= _SHORT)
    found = Counter(text.strip() for text in texts if text.strip().casefold() in _EMPTY)
    if not found:
        return None
    return (
        f"{found.total()} texts of {table.source} are {listing(sorted(found))}, which tables write for an empty cell, "
        "and are read as words: if the cells were empty, remove these rows"
    )


def _one_class_of_test(table: Table) -> str | None:
    """A notice if all test rows have one class although the training rows have several."""
    if table.labels is None:
        return None
    train, test = (np.unique(table.labels[table.rows(split)]) for split in ("train", "test"))
    if len(test) != 1 or len(train) < 2 or len(table.rows("test")) < 2:
        return None
    return f'all test rows are of one class, "{table.classes[test[0]]}": an accuracy on them says little'
