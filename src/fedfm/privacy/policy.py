"""A silo's policy: what requests may expose, in four words; requirements on experiments; lifetime budgets.

    mean      the silo's update goes into a mean; the aggregation decides what the server sees of the update
    reply     the server sees a single reply of this silo
    scores    the server sees metrics of a model on this silo's own rows
    reveal    the server gets this silo's own final model

A request names its kind, and each kind exposes one thing. A handler answers requests of its own kind only, so a server
cannot ask for one thing under the name of another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from fedfm.core.fields import setting
from fedfm.errors import InputError, close, quote_names
from fedfm.privacy.exposure import HELLO, WORDS

TOLERANCE = 1e-6  # relative tolerance of a limit, since a computed epsilon has rounding errors
MECHANISMS = ("own", "gaussian", "correlated_gaussian", "distributed_gaussian", "dp_sgd")


@dataclass(frozen=True)
class Policy:
    """What a silo allows.

    Attributes:
        allow: the words for every method that ``allow_by_method`` does not name.
        allow_by_method: the words for single methods, by a method's name; they replace ``allow``.

    Raises:
        InputError: a word is unknown; the error has its key and the known words.
    """

    allow: tuple[str, ...] = WORDS
    allow_by_method: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("allow", self.allow)
        for name, words in self.allow_by_method.items():
            _check(f"allow_by_method.{name}", words)

    def of(self, method: str, *inner: str) -> tuple[str, ...]:
        """The words for the method of this name, without those that a method inside it may not use."""
        limits = [self.allow_by_method[name] for name in inner if name in self.allow_by_method]
        words = self.allow_by_method.get(method, self.allow)
        return tuple(word for word in words if all(word in limit for limit in limits))

    @property
    def words(self) -> set[str]:
        """All words that some method may use; a silo without words takes part in nothing."""
        return {*self.allow, *(word for words in self.allow_by_method.values() for word in words)}


@dataclass(frozen=True)
class Requirements:
    """A silo's requirements on every experiment. An experiment that guarantees less is refused before it gets data."""

    aggregator: str | None = setting(None, "secagg: the server sees sums of updates only", choices=("secagg",))
    smallest_cohort: int = setting(0, "smallest number of silos in a sum, this one included; needs secagg", ge=0)
    unit: str | None = setting(None, "unit of the epsilon: client or record", choices=("client", "record"))
    mechanism: tuple[str, ...] = setting(
        (),
        "accepted mechanisms: own (the method's own, applied at the silo), distributed_gaussian, dp_sgd; gaussian: the "
        "server adds the noise, and no silo can check that",
        choices=MECHANISMS,
    )
    largest_clip: float | None = setting(None, "largest clip_norm", gt=0)
    least_noise_multiplier: float | None = setting(
        None, "smallest noise of a release, divided by its sensitivity", gt=0
    )
    largest_epsilon: float | None = setting(None, "largest epsilon of a whole experiment", gt=0)
    largest_delta: float | None = setting(None, "largest delta of an experiment", gt=0, lt=1)


@dataclass(frozen=True)
class Budget:
    """A silo's budgets over all runs of its lifetime; the silo's ledger counts what is spent."""

    epsilon: float | None = setting(
        None, "epsilon of all releases together; a release without an epsilon is then refused", gt=0
    )
    delta: float = setting(1e-5, "delta at which epsilon is computed", gt=0, lt=1)
    bytes: int | None = setting(None, "bytes of everything that leaves the silo", ge=0)
    rounds: int | None = setting(None, "rounds in which an update, a reply, scores or a failure leaves the silo", ge=0)


def _check(key: str, words: Sequence[str]) -> None:
    for word in words:
        if word not in WORDS:
            meant = [w for w in WORDS if any(w in _words_of(p) for p in words)]
            right = f"; here {key} = {json.dumps(meant)}" if _words_of(word) or word == HELLO else close(word, WORDS)
            raise InputError(
                f'{key}: "{word}" is not a word of exposure: expected {quote_names(WORDS)}{right}', key=key
            )


def _words_of(pattern: str) -> list[str]:
    """The words that a pattern of handler names, e.g. ``query.*_evaluate``, represents; empty for other texts."""
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
