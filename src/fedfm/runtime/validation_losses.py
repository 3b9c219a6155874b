"""The validation losses in the lines of ``metrics.jsonl``, which decide which round's model is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def best_round(found: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the first round with the lowest validation loss; None if no round has a validation loss.

    If a client is missing in one of two rounds, e.g. because it failed, the rounds' losses cover different rows. So the
    rounds are compared over the clients that are in both.
    """
    best: Mapping[str, Any] | None = None
    for line in _with_loss(found):
        if best is None or _is_better(line, best):
            best = line
    return None if best is None else int(best["round"])


def last_validated(found: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the last round with a validation loss; None if there is no such round."""
    return max((line["round"] for line in _with_loss(found)), default=None)


def _with_loss(found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines with a validation loss, except the line of round 0.

    The uniform predictions of round 0 may have a lower loss than a model that is accurate but overconfident.
    """
    return [m for m in found if m["round"] and m.get("val_loss") is not None]


def _is_better(line: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    mine, others = line.get("client_val_loss"), best.get("client_val_loss")
    if not (isinstance(mine, dict) and isinstance(others, dict)) or mine.keys() == others.keys():
        return bool(line["val_loss"] < best["val_loss"])
    rows = {**best.get("client_val_rows", {}), **line.get("client_val_rows", {})}
    both = sorted(mine.keys() & others.keys())
    return math.fsum(rows[c] * mine[c] for c in both) < math.fsum(rows[c] * others[c] for c in both)
