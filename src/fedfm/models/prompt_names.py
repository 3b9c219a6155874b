"""Names of classes that are identifiers rather than words, and go into the prompts of a text encoder as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedfm.models.architectures.dual_encoder import words_of

_NUMBER = re.compile(r"(?:[a-z]{0,2}\d{2,}|\d+)(?:\s*[._:)-]\s*|\s+)\S*[^\W\d_]", re.IGNORECASE)  # in front of a name
_YEAR = re.compile(r"(?:1[89]|20)\d\d\b")
_JOINED = re.compile(r"[^\W\d_A-Z][A-Z]")  # words that only their capitals divide
_NAMES = re.compile(r"Ma?c[A-Z]|[ie][A-Z]")  # McDonald, MacBook, iPhone, eBay
_SHARE = 0.2  # of the classes, from which it is told, and two at least


def notices(classes: Sequence[str], templates: Sequence[str]) -> list[str]:
    """A line about names with a number in front, with capitals in place of blanks, or with folders."""
    told = [i for i, name in enumerate(classes) if _is_identifier(name)]
    if len(told) < max(2, _SHARE * len(classes)):
        return []
    prompt = templates[0].format(words_of(classes)[told[0]])
    return [
        f"model.templates: {len(told)} of {len(classes)} names of classes go into prompts as they are, as in "
        f'"{prompt}"; '
        "where one says it otherwise, name the classes in words (a column data.label_name, or names as labels)"
    ]


def _is_identifier(name: str) -> bool:
    first = bool(_NUMBER.match(name.replace("_", " "))) and not _YEAR.match(name)
    joined = " " not in name and _JOINED.search(_NAMES.sub("", name)) is not None
    return first or joined or "/" in name.strip("/") or "\\" in name
