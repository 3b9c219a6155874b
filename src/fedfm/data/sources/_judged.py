"""Notices about unread columns that say which answers are good."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_GOOD = re.compile(
    r"label|is[_ ]?good|good|accept(?:ed)?|approved|(?:is[_ ]?)?correct|thumbs(?:[_ ]?up)?|desirable|liked"
)
_NO = {"false", "no", "0", "0.0", "rejected", "bad", "down"}
_YES = {"true", "yes", "1", "1.0", "accepted", "good", "up"}
_GRADES = re.compile(r"(?:human[_ ]?|overall[_ ]?)?(?:rating|score|stars|quality|reward|grade)")
_VALUES = re.compile(r"(?:score|rating|reward)s?[_ ](chosen|rejected)|(chosen|rejected)[_ ](?:score|rating|reward)s?")
_AGAINST = 0.05  # a notice needs at least this share of rows whose worse answer has the higher score


def of_answers(columns: Mapping[str, Sequence[Any]], used: set[str], source: str) -> tuple[str, ...]:
    """A notice about an unread column that rejects or grades answers, since training uses all answers alike.

    Args:
        used: names of the columns that are read, or that select rows.
    """
    for name, values in columns.items():
        low = name.strip().lower()
        if name in used or not (_GOOD.fullmatch(low) or _GRADES.fullmatch(low)):
            continue
        found = {str(value).strip().lower() for value in values if isinstance(value, bool | int | float | str)}
        if _GOOD.fullmatch(low) and found & _NO and found & _YES and found <= _NO | _YES:
            count = sum(str(value).strip().lower() in _NO for value in values)
            return (
                f'column "{name}" of {source} seems to reject {count} of {len(values)} answers, and is not read: they '
                "are learned like the others; data.where can keep only good answers",
            )
        if _GRADES.fullmatch(low) and len(found) > 1 and all(map(_is_number, found)):
            return (
                f'column "{name}" of {source} seems to grade the answers, and is not read: answers with low grades are '
                "learned like the others; data.where can keep only good answers",
            )
    return ()


def of_pairs(columns: Mapping[str, Sequence[Any]], source: str) -> tuple[str, ...]:
    """A notice if columns score both answers, and in many rows the worse answer has the higher score."""
    found: dict[str, Sequence[Any]] = {}
    for name, values in columns.items():
        if of := _VALUES.fullmatch(name.strip().lower()):
            found[of[1] or of[2]] = values
    if len(found) < 2:
        return ()
    both = [
        (float(a), float(b))
        for a, b in zip(found["chosen"], found["rejected"], strict=True)
        if _is_number(str(a)) and _is_number(str(b))
    ]
    against = sum(a < b for a, b in both)
    if not against or against < _AGAINST * len(both):
        return ()
    return (
        f"in {against} of {len(both)} rows of {source} the rejected answer has a higher score than the chosen one: are "
        "the two exchanged?",
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.strip().lower() != "nan"
