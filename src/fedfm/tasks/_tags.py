"""Tags of words, and the entities that they mark.

Entities are counted as in conlleval, the shared task's script: a predicted entity is right if its span and its type are
both right. (Introduction to the CoNLL-2003 Shared Task. Tjong Kim Sang, De Meulder. CoNLL 2003.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

Span = tuple[int, int, str]  # an entity: index of its first word, index of the word after its last, type

OUTSIDE = "O"
PREFIX = re.compile(r"([BIESLUM])(?:-(.*))?")
_SAME = {"L": "E", "U": "S", "M": "I"}  # a prefix in the notation BILOU or BMES -> the same prefix in BIOES


def _parse(tag: str) -> tuple[str, str]:
    """The prefix of a tag (B, I, E or S; O outside entities) and its type; a tag without a prefix counts as I."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    found = PREFIX.fullmatch(tag)
    return (_SAME.get(found[1], found[1]), found[2] or "") if found else ("I", tag)


def type_of(tag: str) -> str:
    """The type of the entity that a tag is part of, e.g. "PER" of "B-PER"; "" outside entities."""
    return _parse(tag)[1]


def spans(tags: Sequence[str]) -> list[Span]:
    """The entities of a sentence with tags in BIO, IOB1, BIOES, BILOU or BMES, as conlleval finds them.

    Example:
        >>> spans(["B-PER", "I-PER", "O", "I-LOC", "B-LOC", "S-ORG"])
        [(0, 2, 'PER'), (3, 4, 'LOC'), (4, 5, 'LOC'), (5, 6, 'ORG')]
    """
    found: list[Span] = []
    before, of = OUTSIDE, ""
    for i, tag in enumerate(tags):
        prefix, name = _parse(tag)
        if prefix != OUTSIDE:
            begins = prefix in "BS" or before in "OES" or name != of
            start = i if begins else found.pop()[0]
            found.append((start, i + 1, name))
        before, of = prefix, name
    return found


def count_begins(sentences: Iterable[Sequence[str]]) -> tuple[int, int]:
    """How many entities begin with I- as in IOB1; and how many with B- as in BIO, where IOB1 has I-.

    IOB1 has B- only for an entity directly behind one of the same type. Such entities are not counted.

    Example:
        >>> count_begins([["I-PER", "I-PER", "O", "B-LOC"], ["I-PER", "B-PER"]])
        (2, 1)
    """
    inside = begun = 0
    for tags in sentences:
        for start, _, name in spans(tags):
            before = tags[start - 1] if start else OUTSIDE
            inside += tags[start].startswith("I") and PREFIX.fullmatch(tags[start]) is not None
            begun += _parse(tags[start])[0] == "B" and not (before != OUTSIDE and type_of(before) == name)
    return inside, begun


def count_ends(sentences: Iterable[Sequence[str]]) -> tuple[int, int]:
    """How many entities end as in BIOES or BILOU, with E, S, L or U; and how many as in BIO, with another prefix.

    Example:
        >>> count_ends([["B-PER", "E-PER", "O", "S-LOC"], ["B-PER", "I-PER", "O", "B-LOC"]])
        (2, 2)
    """
    ends = [_parse(tags[end - 1])[0] in "ES" for tags in sentences for _, end, _ in spans(tags)]
    return sum(ends), len(ends) - sum(ends)


def scores_of_entities(entities: float, found: float, right: float, known: bool) -> dict[str, Any]:
    """Precision, recall and F1: 0 if the divisor is 0, as in conlleval; None if there are no words (not ``known``)."""
    if not known:
        return dict.fromkeys(("precision", "recall", "f1"))
    return {
        "precision": right / found if found else 0.0,
        "recall": right / entities if entities else 0.0,
        "f1": 2 * right / (entities + found) if entities + found else 0.0,
    }


def entity(words: Sequence[str], span: Span) -> dict[str, Any]:
    """An entity as a JSON object; ``end`` is the index of the word after its last word."""
    start, end, name = span
    return {"type": name, "start": start, "end": end, "text": " ".join(words[start:end])}


def order(tag: str) -> tuple[bool, str]:
    """A sort key: tags by name, O first."""
    return tag != OUTSIDE, tag
