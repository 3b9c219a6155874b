"""More seeds of a row whose figures and rates a page has: no search again, no seed again but the first as a check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

APART = 0.2  # points, or hundredths of a nat, by which rounding on another processor may move a figure
# keys that depend on the machine, hold words or a curve, or follow from the plan alone
NO_FIGURES = ("seconds", "more", "curve", "epsilon")


def add_seeds(
    row: str, seeds: Sequence[int], earlier: Mapping[str, Any], run: Callable[[int], dict[str, Any]]
) -> dict[str, Any]:
    """Seed -> what is kept: of ``earlier`` seeds as it was, of the others by ``run``.

    The first seed is always run. If its figures have moved, the code or the processor differs, and earlier and new
    figures do not belong in one mean. Then a line says so, and every seed is run.
    """
    found: dict[str, Any] = {}
    same = False
    for seed in map(str, seeds):
        if same and seed in earlier:
            found[seed] = earlier[seed]
            continue
        found[seed] = run(int(seed))
        if len(found) == 1 and seed in earlier:
            moved = differences(earlier[seed], found[seed])
            same = not moved
            if moved:
                print(f"{row}: seed {seed} moved, so every seed is run: {', '.join(moved)}", file=sys.stderr)
    return found


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
