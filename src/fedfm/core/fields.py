"""Settings: a field's default, meaning and bounds in one place, with checks of all values.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Pull:
...     mu: float = setting(0.01, "weight of the proximal term", ge=0)
>>> check(Pull(mu=-1), "method")
Traceback (most recent call last):
    ...
fedfm.errors.InputError: method.mu = -1: expected a number of at least 0
"""

from __future__ import annotations

import functools
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from fedfm.core.open_settings import complete_class
from fedfm.errors import Absent, Faults, InputError, close, quote_names

KINDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}


@dataclass(frozen=True)
class Paper:
    """A setting in a method's paper. The method's attribute ``paper`` has one for each key, e.g. "method.local.betas".

    Attributes:
        value: from the paper's experiments or equations; a text if the key does not accept the value.
        why: the reason for another default; "" if the default is the paper's.
    """

    value: Any
    why: str = ""


@dataclass(frozen=True)
class Bounds:
    """Allowed values. Bounds of a list or a table apply to each entry; None always passes.

    Attributes:
        gt, ge, lt, le: bounds of a number: above, at least, below, at most.
        finite: whether infinity is refused.
        but: single values that are refused.
        choices: the allowed texts.
        pattern: regular expression for the whole text, in syntax common to Python and JSON Schema.
        keys: pattern for the keys of a table.
        least, most: smallest and largest number of entries of a list or a table; ``most`` = 0 sets no limit.
        words: the expected value in words, for messages; by default derived from the bounds.
    """

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    finite: bool = False
    but: tuple[float, ...] = ()
    choices: tuple[str, ...] = ()
    pattern: str = ""
    keys: str = ""
    least: int = 0
    most: int = 0
    words: str = ""

    def admit(self, value: Any) -> bool:
        """Whether one value (no list or table) is within the bounds."""
        limited = self.finite or self.but or any(end is not None for end in (self.gt, self.ge, self.lt, self.le))
        if (self.choices or self.pattern) and (isinstance(value, str) or not limited):  # numbers are checked below
            known = isinstance(value, str) and (not self.choices or value in self.choices)
            return known and (not self.pattern or re.fullmatch(self.pattern, value) is not None)
        if not limited:
            return True
        if isinstance(value, (str, bool)) or not hasattr(value, "__float__"):
            return False
        if not isinstance(value, int) and math.isnan(value):
            return False
        return not (
            (self.gt is not None and value <= self.gt)
            or (self.ge is not None and value < self.ge)
            or (self.lt is not None and value >= self.lt)
            or (self.le is not None and value > self.le)
            or (self.finite and not isinstance(value, int) and math.isinf(value))
            or value in self.but
        )

    def words_for(self, hint: Any) -> str:
        """The allowed values of this type in words, e.g. "a finite number of at least 0"."""
        if self.words:
            return self.words
        if self.choices:
            *rest, last = (f'"{choice}"' for choice in self.choices)
            return f"{', '.join(rest)} or {last}" if rest else last
        kind = KINDS.get(leaf(hint), "a value")
        if self.finite:
            kind = kind.replace("a number", "a finite number")
        low = self.gt if self.ge is None else self.ge
        high = self.lt if self.le is None else self.le
        if low is not None and high is not None:
            if leaf(hint) is int:
                kind += f" from {low} to {high}"
            else:
                kind += f" in {'(' if self.ge is None else '['}{low}, {high}{')' if self.le is None else ']'}"
        elif low is not None:
            kind += f" above {low}" if self.ge is None else f" of at least {low}"
        elif high is not None:
            kind += f" below {high}" if self.le is None else f" of at most {high}"
        return kind + (f" other than {' and '.join(f'{number:g}' for number in self.but)}" if self.but else "")


def setting(
    default: Any,
    help: str = "",
    *,
    required: bool = False,
    of: tuple[str, ...] = (),
    metadata: Mapping[str, Any] = types.MappingProxyType({}),
    **bounds: Any,
) -> Any:
    """A field of a settings dataclass.

    Args:
        default: value if the key is absent; if it is a class, each settings object calls it to make its value.
        help: the key's meaning in one line.
        required: whether None and "" are refused.
        of: values of the field ``name`` that accept this key; others refuse it.
        metadata: further keys. ``server_only``: clients do not get the value. ``usual``: the default that ``None``
            stands for. ``alone``: a word that may stand in place of a list. ``names``: texts that messages
            suggest for a misspelt text. ``true``, ``false``: the texts that these values stand for; if ``false`` is
            missing, the value false equals an absent key.
        bounds: arguments of :class:`Bounds`.

    Raises:
        TypeError: an unknown bound.
    """
    facts = {"help": help, "bounds": Bounds(**bounds), "required": required, "of": of} | dict(metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=facts)
    return field(default=default, metadata=facts)


def key_of(name: str) -> str:
    """The key of a field: ``lambda_`` has the key ``lambda``, a reserved word in Python."""
    return name.removesuffix("_")


def types_of(cls: type[Any]) -> Mapping[str, Any]:
    """The type of each field of a class, by name. Annotations are texts, which are evaluated once for each class."""
    return _types_of(cls)  # type: ignore[arg-type]  # mypy does not know that classes are hashable


@functools.cache
def _types_of(cls: type[Any]) -> Mapping[str, Any]:
    return types.MappingProxyType(get_type_hints(cls))


def settings_of(cls: Any) -> Iterator[tuple[str, Field[Any], Any]]:
    """(key, field, type) of each field that a table may set."""
    cls = complete_class(cls)
    hints = types_of(cls)
    return ((key_of(f.name), f, hints[f.name]) for f in fields(cls) if f.init)


def plain_type(hint: Any) -> Any:
    """The type without "or None"."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return next(a for a in get_args(hint) if a is not types.NoneType)
    return hint


def leaf(hint: Any) -> Any:
    """The type of the entries of a list or a table; for any other type the type itself."""
    hint = plain_type(hint)
    inside = {tuple: 0, dict: 1}.get(get_origin(hint))
    return hint if inside is None else leaf(get_args(hint)[inside])


def bounds_of(f: Field[Any]) -> Bounds:
    """The bounds that a field declares; a plain field has none."""
    return f.metadata.get("bounds", Bounds())  # type: ignore[no-any-return]


def owners_of(f: Field[Any]) -> tuple[str, ...]:
    """The values of ``name`` that accept this key; if empty, all values do."""
    return f.metadata.get("of", ())  # type: ignore[no-any-return]


def is_required(f: Field[Any]) -> bool:
    """Whether the key is required although the dataclass has a default."""
    return bool(f.metadata.get("required")) or _outside(f)


def needs_value(f: Field[Any]) -> bool:
    """Whether the dataclass's default would be refused, so that the key must be set."""
    return f.default not in ("", ()) and _outside(f)


def _outside(f: Field[Any]) -> bool:
    return f.default is not MISSING and f.default is not None and any(_wrong(f.default, bounds_of(f), ""))


def describe(f: Field[Any], hint: Any) -> str:
    """The meaning of a key, followed by its allowed values unless the meaning names them."""
    text, bounds = str(f.metadata.get("help", "")), bounds_of(f)
    named = bounds == Bounds() or bounds.words or (bounds.choices and all(choice in text for choice in bounds.choices))
    return text if named else f"{text}; {bounds.words_for(hint)}"


def check(settings: Any, where: str) -> None:
    """Refuse the values outside their bounds, in a settings dataclass and in the dataclasses of its fields.

    Args:
        settings: the instance.
        where: name of its table, e.g. "method"; "" for a file of one table.

    Raises:
        InputError: the message has the key, the value and what is expected; ``more`` has the other faults.
    """
    faults, missing, at = Faults(), list[Absent](), f"{where}." if where else ""
    hints = types_of(type(settings))
    named = next((f for f in fields(settings) if f.name == "name"), None)
    known = named is None or not any(True for _ in _wrong(settings.name, bounds_of(named), ""))
    for f in fields(settings):
        key, value, owners = at + key_of(f.name), getattr(settings, f.name), owners_of(f)
        if is_dataclass(value) and f.init:
            with faults:
                check(value, key)
        wrong = [*outside(f, hints[f.name], value, key)]
        for fault in wrong:
            faults.add(fault)
        if owners and not known:
            continue  # the name is wrong, so the owners of its keys are unknown
        mine = not owners or settings.name in owners
        if value is not None and not mine:
            theirs = quote_names(key_of(other.name) for other in fields(settings) if settings.name in owners_of(other))
            takes = f", which takes {theirs}" if theirs else ""
            text = f'{key} belongs to {quote_names(owners)}, not to "{settings.name}"{takes}'
            faults.say(text, key=key, owners=owners)
        if value in (None, "") and mine and f.metadata.get("required") and not wrong:
            by = f'required by "{settings.name}"' if owners else "missing"
            allowed = _expected_words(settings, f)
            missing.append(Absent(f"{key} is {by}: expected {allowed}", key=key, allowed=allowed))
    for one in missing:
        faults.add(one)
    faults.refuse()


def outside(f: Field[Any], hint: Any, value: Any, key: str) -> Iterator[InputError]:
    """Yield an error for each value of a field that is out of bounds; :class:`Absent` for a missing required value."""
    bounds = bounds_of(f)
    kind = Absent if f.metadata.get("required") and value in ("", ()) else InputError
    for place, wrong in _wrong(value, bounds, key):
        near = close(wrong, bounds.choices or f.metadata.get("names", ())) if isinstance(wrong, str) else ""
        allowed = bounds.words_for(hint)
        yield kind(f"{place} = {toml_value(wrong)}: expected {allowed}{near}", key=key, allowed=allowed)


def _expected_words(settings: Any, f: Field[Any]) -> str:
    return bounds_of(f).words_for(types_of(type(settings))[f.name])


def _wrong(value: Any, bounds: Bounds, key: str) -> Iterator[tuple[str, Any]]:
    """(place, value) of each value outside the bounds."""
    if isinstance(value, (tuple, list, Mapping)):
        fits = bounds.least <= len(value) <= (bounds.most or len(value))
        if not fits or (isinstance(value, Mapping) and not _matches_names(value, bounds)):
            yield key, value
        entries = value.items() if isinstance(value, Mapping) else ((i, v) for i, v in enumerate(value))
        for at, entry in entries:
            yield from _wrong(entry, bounds, f"{key}.{at}" if isinstance(value, Mapping) else f"{key}[{at}]")
    elif value is not None and not is_dataclass(value) and not bounds.admit(value):
        yield key, value


def _matches_names(table: Mapping[str, Any], bounds: Bounds) -> bool:
    return not bounds.keys or all(re.fullmatch(bounds.keys, name) for name in table)


def toml_value(value: Any) -> str:
    """A value in TOML's notation, shortened for messages."""
    if isinstance(value, str):
        return f'"{value:.80}"'
    if isinstance(value, bool):
        return str(value).lower()
    return f"{list(value) if isinstance(value, tuple) else value!s:.80}"
