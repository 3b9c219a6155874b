"""Tables of docs/results/blindfed-vit-tiny.md, each between its own two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "blindfed-vit-tiny.md"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; numbers with three digits."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *(f"| {' | '.join(_format(row[name]) for name in names)} |" for row in rows)])


def _format(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def merge(name: str, text: str) -> None:
    """Put the rows of a table into the one that the page has, in place of those with the same first cell."""
    head, rule, *new = text.splitlines()
    found = _parts(name)[1].splitlines()
    first = {line.split(" | ")[0] for line in new}
    kept = [line for line in found[2:] if line.split(" | ")[0] not in first] if found[:1] == [head] else []
    write(name, "\n".join([head, rule, *kept, *new]))


def write(name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name -->`` and ``<!-- end name -->``."""
    before, _, after = _parts(name)
    PAGE.write_text(f"{before}{text}\n{after}", encoding="utf-8")


def _parts(name: str) -> tuple[str, str, str]:
    """The page up to a table with its first mark, the table, and the rest from its last mark on."""
    page = PAGE.read_text(encoding="utf-8")
    first, last = f"<!-- {name} -->\n", f"<!-- end {name} -->"
    start = page.index(first) + len(first)
    stop = page.index(last, start)
    return page[:start], page[start:stop], page[stop:]
