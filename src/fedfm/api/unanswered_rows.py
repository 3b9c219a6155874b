"""Withhold class predictions of rows for which the model computed no values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_NAMED = 5  # number of rows that the notice names


def withhold_unanswered(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result with ``None`` as prediction and as probabilities of each row with a probability of NaN.

    Args:
        result: ``predictions`` (n,) and ``probabilities`` (n, C); other results stay unchanged.
    """
    given = result.get("probabilities", ())
    lost = {i for i, p in enumerate(given) if isinstance(p, list) and any(map(math.isnan, p))}
    if "predictions" not in result or not lost:
        return dict(result)
    return dict(result) | {
        key: [None if i in lost else value for i, value in enumerate(result[key])]
        for key in ("predictions", "probabilities")
    }


def describe_unanswered(result: Mapping[str, Any]) -> list[str]:
    """A notice that counts the rows without a prediction and names the first; [] if every row has a prediction.

    Args:
        result: ``predictions``, and ``ids`` or ``files`` if rows have names.
    """
    labels: Sequence[Any] = result.get("predictions", ())
    names = result.get("ids") or result.get("files") or [f"row {i}" for i in range(len(labels))]
    lost = [str(name) for name, label in zip(names, labels, strict=False) if label is None]
    if not lost:
        return []
    more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
    return [
        f"{len(lost)} of {len(labels)} rows have no prediction, since they left the intervals or the limits of the "
        f"model's polynomials: {', '.join(lost[:_NAMED])}{more}"
    ]
