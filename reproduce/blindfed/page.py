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
    return "\n".join([*lines, *(f"| {' | '.join(_shown(row[name]) for name in names)} |" for row in rows)])


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write(name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name -->`` and ``<!-- end name -->``."""
    page = PAGE.read_text(encoding="utf-8")
    first, last = f"<!-- {name} -->\n", f"<!-- end {name} -->"
    before, rest = page.split(first)
    after = rest.split(last)[1]
    PAGE.write_text(f"{before}{first}{text}\n{last}{after}", encoding="utf-8")
