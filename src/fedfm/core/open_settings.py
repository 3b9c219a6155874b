"""Settings to which other modules add keys, as tasks add keys to the tables [data] and [model] and to a silo's file.

A module that adds a key is imported only if a table needs the key. So the values of settings determine their class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, make_dataclass
from typing import TYPE_CHECKING, Any

Setting = tuple[Any, Field[Any]]  # type and field of a key


class _ByValues(type):
    """The metaclass of open settings. A call of such a class makes an instance of the class that the values need."""

    if not TYPE_CHECKING:

        def __call__(cls, *args, **values):
            common = cls.common_class()
            given = dict(zip(_names(common), args, strict=False)) | values
            own = common.own_keys(given)
            others = {key: of for key, of in common.other_keys(given, own).items() if of is not None}
            needed = {key: of for key, of in others.items() if given[key] != of[1].default}
            for key in others.keys() - needed.keys():
                del values[key]
            return type.__call__(common.with_keys(own | needed), *args, **values)


class OpenSettings(metaclass=_ByValues):
    """The base class of open settings. A subclass is a frozen dataclass of the common keys.

    The class of an instance has the common keys, those of :meth:`own_keys`, and each other key whose value is not the
    default. So equal values always have the same class. An instance returns the default for any other key.
    """

    @classmethod
    def own_keys(cls, values: Mapping[str, Any]) -> dict[str, Setting]:
        """The keys that settings with these values always have, even if their values are defaults.

        They include a common key if only other modules allow its value.
        """
        return {}

    @classmethod
    def setting_of(cls, key: str) -> Setting | None:
        """Type and field of a key that is not common; None if no module adds it."""
        raise NotImplementedError

    @classmethod
    def all_keys(cls) -> dict[str, Setting]:
        """All keys that other modules add, and the common keys whose allowed values other modules extend."""
        raise NotImplementedError

    @classmethod
    def common_class(cls) -> type[OpenSettings]:
        """The class of the common keys."""
        found: type[OpenSettings] = vars(cls).get("_common", cls)
        return found

    @classmethod
    def other_keys(cls, values: Mapping[str, Any], own: Mapping[str, Setting]) -> dict[str, Setting | None]:
        """The keys of ``values`` that are neither common nor ``own``."""
        known = {*_names(cls.common_class()), *own}
        return {key: cls.setting_of(key) for key in sorted(values.keys() - known)}

    @classmethod
    def with_keys(cls, keys: Mapping[str, Setting]) -> type[OpenSettings]:
        """The class with the common keys and these keys."""
        common = cls.common_class()
        at = common, tuple(keys)
        if keys and at not in _made:
            some = [(key, hint, of) for key, (hint, of) in keys.items()]
            about = {"_common": common, "__module__": common.__module__, "__doc__": common.__doc__}
            _made[at] = make_dataclass(common.__name__, some, bases=(common,), namespace=about, frozen=True)
        return _made[at] if keys else common

    @classmethod
    def added_keys(cls) -> tuple[str, ...]:
        """The keys of this class that are not common."""
        return tuple(name for name in _names(cls) if name not in _names(cls.common_class()))

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            of = None if name.startswith("_") else self.setting_of(name)
            if of is None:
                raise AttributeError(f"{type(self).__name__} has no key {name!r}")
            return of[1].default


_made: dict[tuple[type[OpenSettings], tuple[str, ...]], type[OpenSettings]] = {}


def _names(cls: Any) -> list[str]:
    return [f.name for f in fields(cls)]


def complete_class(cls: type[Any]) -> type[Any]:
    """The class with all keys that a table may have."""
    return cls.with_keys(cls.all_keys()) if issubclass(cls, OpenSettings) else cls


def class_for(cls: type[Any], table: Mapping[str, Any]) -> type[Any]:
    """The class with the keys of a table. If the table has an unknown key, the class has all keys."""
    if not issubclass(cls, OpenSettings):
        return cls
    own = cls.own_keys(table)
    found: dict[str, Setting] = {}
    for key, of in cls.other_keys(table, own).items():
        if of is None:
            return complete_class(cls)
        found[key] = of
    return cls.with_keys(own | found)
