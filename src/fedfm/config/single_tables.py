"""Check one table of an experiment without the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedfm.config.run_spec import RunSpec
from fedfm.config.toml import build, build_named
from fedfm.core.fields import check
from fedfm.data.spec import DataSpec
from fedfm.data.spec import check as check_data
from fedfm.models.adapters.adaptation import with_defaults
from fedfm.models.spec import ModelSpec
from fedfm.privacy.spec import PrivacySpec
from fedfm.privacy.spec import check as check_privacy

SPECS: Mapping[str, type] = {"data": DataSpec, "model": ModelSpec, "privacy": PrivacySpec, "run": RunSpec}
# For each table, its kind in the registry, and the default of its key ``name``.
KINDS = {"method": ("methods", ""), "attack": ("attacks", ""), "aggregation": ("aggregation", "mean")}


def check_alone(section: str, tables: Mapping[str, Any]) -> None:
    """Refuse values of one table that are wrong whatever the other tables contain."""
    table = tables.get(section)
    if not isinstance(table, Mapping):
        return
    if section in KINDS:
        kind, default = KINDS[section]
        found = build_named(kind, table, section, default=default)[1]
    else:
        found = build(SPECS[section], table, section)
    if section == "model" and found.adaptation is not None:
        found = dataclasses.replace(found, adaptation=with_defaults(found.adaptation, found.task))
    if section == "data":
        check_data(found)
    elif section == "privacy" and found.states_epsilon:
        check_privacy(found)
    elif section != "privacy":
        check(found, section)
    if section == "method":
        found.validate()
