"""The keys that the tables of an experiment take, from the classes that they name; no instance is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, is_dataclass
from typing import Any, get_origin

from fedfm.config.registry import resolve
from fedfm.config.run_spec import RunSpec
from fedfm.config.toml import kind_of, own_default
from fedfm.core.capabilities import HiddenModel
from fedfm.core.fields import owners_of, plain_type, settings_of
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.models.spec import ModelSpec
from fedfm.privacy.spec import PrivacySpec

SPECS: Mapping[str, type] = {"data": DataSpec, "model": ModelSpec, "privacy": PrivacySpec, "run": RunSpec}
KINDS = {"method": ("methods", ""), "attack": ("attacks", ""), "aggregation": ("aggregation", "mean")}  # and default


class KnownKeys:
    """The keys that the tables of one experiment take, to suggest one of them for an unknown key.

    Args:
        value: the value of the unknown key; "" represents any value that is not a table.

    Attributes:
        method: name of the experiment's method; "" if it has none.
    """

    def __init__(self, tables: Mapping[str, Any], value: Any = "") -> None:
        self._tables, self._value = tables, value
        table = tables.get("method")
        self.method = str(table.get("name", "")) if isinstance(table, Mapping) else ""

    def refusal(self, key: str, **names: str) -> InputError | None:
        """Why a key ``a.b.c`` is refused; None if it is accepted, or if a wrong name makes this unknown.

        Args:
            names: name of an inner table -> the name to assume for it, as ``local="adam"``.
        """
        section, *path = key.split(".")
        if not path:
            return None if section in SPECS or section in KINDS or section == "name" else InputError(key=section)
        method = self._class("method", names)
        if section == "model" and method is not None and issubclass(method, HiddenModel):
            return InputError(key="model")  # the method says which
        cls, at = self._class(section, names), section
        for i, part in enumerate(path):
            if cls is None or (part == "name" and kind_of(cls)):
                return None
            known = {name: (field, hint) for name, field, hint in settings_of(cls)}
            above, at = at, f"{at}.{part}"
            if part not in known:
                return InputError(key=at)
            others = (other for other in getattr(cls, "one_of", ()) if other != part)
            if part in getattr(cls, "one_of", ()) and any(other in self._table(above) for other in others):
                return InputError(key=at)  # only one of them may be set
            field, hint = known[part]
            if (owners := owners_of(field)) and self._name(above, names, str(known["name"][0].default)) not in owners:
                return InputError(key=at, owners=owners)
            inner = plain_type(hint)
            if i + 1 == len(path):
                is_table = is_dataclass(inner) or get_origin(inner) is dict
                return InputError(key=at) if is_table and not isinstance(self._value, Mapping) else None
            cls = self._named_class(at, names, field, inner) if kind_of(inner) else inner
            if not is_dataclass(cls):
                return None
            if kind_of(inner) and not issubclass(cls, inner):
                return InputError(key=f"{at}.name")
        return None

    def _class(self, section: str, names: Mapping[str, str]) -> type | None:
        """The class of a table of the experiment; None if its name is unknown."""
        if section not in KINDS:
            return SPECS.get(section)
        kind, default = KINDS[section]
        return _resolve(kind, self._name(section, names, default))

    def _named_class(self, at: str, names: Mapping[str, str], field: Field[Any], hint: type) -> type | None:
        default = own_default(field)
        name = self._name(at, names, "")
        return _resolve(kind_of(hint), name) if name else hint if default is None else type(default)

    def _name(self, at: str, names: Mapping[str, str], default: str) -> str:
        """The name in a table of the experiment; ``default`` if it has none."""
        return names.get(at.rpartition(".")[2], str(self._table(at).get("name", default)))

    def _table(self, at: str) -> Mapping[str, Any]:
        """A table of the experiment; empty if it is missing."""
        table: Any = self._tables
        for part in at.split("."):
            table = table.get(part) if isinstance(table, Mapping) else None
        return table if isinstance(table, Mapping) else {}


def _resolve(kind: str, name: str) -> type | None:
    try:
        found: type = resolve(kind, name)
        return found
    except InputError:  # an unknown name is refused before the keys of its table
        return None
