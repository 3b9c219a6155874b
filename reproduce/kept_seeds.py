"""More seeds of a row whose figures and rates a page has: no search again, no seed again but the first as a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

APART = 0.2  # points, or hundredths of a nat, by which rounding on another processor may move a figure
# keys that depend on the machine, hold words or a curve, or follow from the plan alone
NO_FIGURES = ("seconds", "more", "curve", "epsilon")


def refuse_moved(table: str, moved: Mapping[str, Sequence[str]], again: str) -> None:
    """Refuse to add seeds to a table of which a row's first seed gives other figures now.

    The code or the processor differs then. A table with old rows and new ones would compare the two, so the whole
    table is run again, or stays as it is.

    Args:
        moved: row -> what :func:`differences` says of its first seed.
        again: the command that runs the whole table.

    Raises:
        SystemExit: a row has moved.
    """
    lines = [f"{row}: the first seed moved: {', '.join(figures)}" for row, figures in moved.items() if figures]
    if lines:
        kept = f"{table} stays as it is, since old and new figures do not belong in one table"
        raise SystemExit("\n".join([*lines, f"{kept}: run all of it again, `{again}`"]))


def add_seeds(seeds: Sequence[int], earlier: Mapping[str, Any], run: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Seed -> what is kept: of ``earlier`` seeds as it was, of the others by ``run``."""
    return {name: earlier[name] if name in earlier else run(int(name)) for name in map(str, seeds)}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``accuracy 84.1 -> 84.6``: the figures of a run that are further apart than rounding moves them.

    What the earlier run did not measure is not compared.
    """
    out = []
    for key in sorted(set(old) - set(NO_FIGURES)):
        before, now = old[key], new.get(key)
        numbers = isinstance(before, int | float) and isinstance(now, int | float)
        scale = 100.0 if key.endswith("_loss") else 1.0
        if before != now and not (numbers and scale * abs(now - before) <= APART):
            out.append(f"{key} {before} -> {now}")
    return out
