"""A method's defaults that differ from the values in its paper, for `fedfm show` and the reference."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from fedfm.config.registry import name_of
from fedfm.core.fields import key_of
from fedfm.models.spec import AdaptationSpec
from fedfm.privacy.spec import PrivacySpec

_TABLES: dict[str, Any] = {"model": {"adaptation": AdaptationSpec()}, "privacy": PrivacySpec()}


def differences(cls: type) -> list[dict[str, Any]]:
    """``key``, ``default``, ``paper`` and ``why`` of each setting whose default differs from the paper's.

    If the paper also sets keys of further tables, the method has these tables' defaults in ``paper_tables``.

    Raises:
        LookupError: ``cls.paper`` names a key that does not exist.
    """
    rows = []
    for key, paper in getattr(cls, "paper", {}).items():
        default = _default(_TABLES | dict(getattr(cls, "paper_tables", {})) | {"method": cls}, key)
        if default != paper.value:
            plain = list(default) if isinstance(default, tuple) else default
            in_paper = list(paper.value) if isinstance(paper.value, tuple) else paper.value
            rows.append({"key": key, "default": plain, "paper": in_paper, "why": paper.why})
    return rows


def _default(tables: dict[str, Any], key: str) -> Any:
    """The default of a dotted key; if the default is None, the value that None stands for."""
    found: Any = tables
    for part in key.split("."):
        if part == "name" and (name := name_of("optimisers", found)):
            return name
        found = found[part] if isinstance(found, dict) else _field(found, part)
    return found


def _field(table: Any, key: str) -> Any:
    """The default of a key in a settings class, or its value in an instance, which may differ from that default."""
    f = {key_of(f.name): f for f in fields(table)}[key] if is_dataclass(table) else None
    if f is None:
        raise LookupError(f"{key}: a setting has no keys")
    value = f.default if isinstance(table, type) else getattr(table, f.name)
    return f.metadata.get("usual", value) if value is None else value
