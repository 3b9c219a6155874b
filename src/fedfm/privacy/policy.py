"""A silo's policy, in words of what a request exposes of it, not in names of handlers.

    mean      its update goes into a mean, of which the server sees what the aggregation shows
    reply     the server sees a reply of this silo by itself
    scores    the server sees metrics of a model on this silo's own rows
    reveal    the server gets this silo's own final model

A request names its kind, and each kind exposes one thing. A server cannot ask for one thing under the name of another:
a handler answers under its own kind only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from fedfm.errors import InputError, close, listed

HELLO = "query.hello"  # says who the silo is: answered where anything is allowed
WORDS = ("mean", "reply", "scores", "reveal")
EXPOSES = {"train": "mean", "aggregate": "mean", "query": "reply", "scores": "scores", "reveal": "reveal"}  # by kind


@dataclass(frozen=True)
class Policy:
    """What a silo lets out.

    Attributes:
        allow: words, for every method that ``allow_by_method`` does not name.
        allow_by_method: words by a method's name; they take the place of ``allow``.
    """

    allow: tuple[str, ...] = WORDS
    allow_by_method: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what is no word.

        Raises:
            InputError: with the key, and the words to write.
        """
        _check("allow", self.allow)
        for name, words in self.allow_by_method.items():
            _check(f"allow_by_method.{name}", words)

    def of(self, method: str) -> tuple[str, ...]:
        """The words for the method of this name."""
        return tuple(self.allow_by_method.get(method, self.allow))

    @property
    def words(self) -> set[str]:
        """All that some method may do; without any the silo takes part in nothing."""
        return {*self.allow, *(word for words in self.allow_by_method.values() for word in words)}


def _check(key: str, words: Sequence[str]) -> None:
    for word in words:
        if word not in WORDS:
            meant = [w for w in WORDS if any(w in _meant(p) for p in words)]
            right = f"; here {key} = {json.dumps(meant)}" if _meant(word) or word == HELLO else close(word, WORDS)
            raise InputError(f'{key}: "{word}" is no word of exposure: expected {listed(WORDS)}{right}')


def _meant(pattern: str) -> list[str]:
    """What a pattern of handlers, e.g. ``query.*_evaluate``, stands for; empty for what is none."""
    kind, dot, rest = pattern.partition(".")
    if pattern in WORDS:
        return [pattern]
    if not (dot or pattern == "*") or pattern == HELLO:
        return []
    found = ["mean"] if fnmatchcase("train", kind) else []
    if fnmatchcase("query", kind):
        every = rest in ("", "*")
        asked = [word for word, part in (("scores", "evaluate"), ("reveal", "reveal")) if every or part in rest]
        found += asked if asked and not every else ["reply", *asked]
    return found
