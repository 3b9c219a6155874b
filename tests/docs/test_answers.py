"""The threat model's table of what one answer tells names every message that a client can answer, and no other."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from fedfm.aggregation.base import Aggregator, Mechanism, Transport
from fedfm.config.registry import available
from fedfm.core.method import Method
from fedfm.privacy.exposure import EXPOSES
from fedfm.runtime.evaluation import Evaluation
from fedfm.runtime.row_sums import RowSums

PAGE = Path(__file__).parents[2] / "docs" / "threat-model.md"


def classes() -> list[Any]:
    """Those that may have handlers: methods, aggregations and their parts, the evaluation, sums of rows."""
    for kind in ("methods", "aggregation"):
        for place in available(kind).values():
            import_module(place.partition(":")[0])
    found, waiting = [Evaluation, RowSums], [Method, Aggregator, Transport, Mechanism]
    while waiting:
        found.append(cls := waiting.pop())
        waiting += cls.__subclasses__()
    return [cls for cls in found if cls.__module__.startswith("fedfm.")]


def handlers() -> dict[str, str]:
    """Kind by ``Class.function`` of the class that defines it."""
    found = {}
    for cls in classes():
        for name, fn in vars(cls).items():
            if getattr(fn, "on_client", False):
                found[f"{cls.__name__}.{name}"] = fn.kind
    return found


def table() -> str:
    (section,) = re.findall(r"^## What one answer tells\n(.*?)^## ", PAGE.read_text(), re.M | re.S)
    return "\n".join(line for line in section.splitlines() if line.startswith("|"))


def test_every_message_has_a_row_and_every_row_a_message():
    named = re.findall(r"`([A-Z]\w+\.\w+)`", table())
    assert sorted(named) == sorted(handlers())


def test_every_kind_of_message_is_one_of_the_ledger():
    assert {kind for kind in handlers().values() if kind} <= EXPOSES.keys()
