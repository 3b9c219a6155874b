"""Details of a FedPFT run: bytes by the paper's formulas, rows that were left out, and Theorem 4.2's bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor

from fedfm import seeds
from fedfm.core.client import Client, ClientId
from fedfm.core.federation import Federation
from fedfm.core.rows import Rows
from fedfm.methods.fedpft.bound import Divergence, bound, divergence
from fedfm.methods.fedpft.encoding import formula_numbers
from fedfm.methods.fedpft.mixtures import Mixture
from fedfm.methods.fedpft.summary import Summary, Synthetic


def communication(
    replies: Mapping[ClientId, Summary], dim: int, width: int, star: bool, counted: bool
) -> dict[str, Any]:
    """The components used, the withheld classes, and bytes by equations (10) to (12) with ``width`` bytes per number.

    If ``counted`` is false, clients did not send their numbers of rows, so the size of the raw features is unknown.
    """
    sent = [(s.mixtures.covariance, k) for s in replies.values() for k in s.mixtures.components]
    details: dict[str, Any] = {"formula_bytes": width * sum(formula_numbers(kind, dim, k) for kind, k in sent)}
    if counted:
        details["raw_feature_bytes"] = width * dim * sum(sum(s.counts) for s in replies.values())
    lower = star and counted and details["raw_feature_bytes"] < details["formula_bytes"]
    warnings = ["the raw features would be smaller than the mixtures: lower method.components"] if lower else []
    return details | {
        "components_used": {
            c: dict(zip(map(str, s.labels), s.mixtures.components, strict=True)) for c, s in replies.items()
        },
        "withheld": {c: s.withheld for c, s in replies.items() if s.withheld},
        "warnings": warnings,
    }


def left_out(details: Mapping[str, Any], min_count: int, private: bool) -> list[str]:
    """Notices about rows that no mixture represents, or whose noisy sum is below its noise."""
    if rows := details.get("withheld_rows"):
        drawn = " (rows drawn from noisy sums)" if private else ""
        return [
            f"{_many(rows, 'row')} of {_many(details['withheld_classes'], 'class', 'classes')} withheld{drawn}: "
            f"each of these classes has fewer than method.min_count = {min_count} rows at its client"
        ]
    if (rows := details.get("left_out_rows")) is not None and details["cells"] > details["cells_kept"]:
        return [
            f"{details['cells'] - details['cells_kept']} of {details['cells']} noisy sums are not above their noise "
            f"and are left out; by their noisy counts they stand for about {_many(rows, 'row')} (standard deviation "
            f"{details['left_out_rows_std']:.0f})"
        ]
    return []


def _many(n: int, one: str, more: str = "") -> str:
    return f"{n} {one if n == 1 else more or one + 's'}"


def divergences(
    client: Client, x: np.ndarray, y: np.ndarray, sent: Mapping[int, Mixture], smoothing: float
) -> list[Divergence]:
    """Client half of the bound, Appendix F: each class's divergence from the mixture that the client sends for it."""
    width = smoothing * float(x.std(0).mean())
    return [divergence(x[y == c], g, width, seeds.generator(client.seed, "bound", c)) for c, g in sent.items()]


def bound_details(
    fed: Federation,
    logits: Callable[[Rows], Tensor],
    replies: Mapping[ClientId, Summary],
    received: Mapping[ClientId, Sequence[tuple[int, int, Mixture]]],
    min_count: int,
) -> dict[str, Any]:
    """The bound of Theorem 4.2, corrected and as printed, from the head's errors on newly drawn features.

    A withheld class has at most ``min_count`` - 1 rows; the bound counts that many errors for it.
    """
    errors = draws = 0
    for c, found in sorted(received.items()):
        for x, y in Synthetic(found, 0, fed.seed_for("bound", c))():
            errors += int((logits(Rows({"features": x})).argmax(1) != y).sum())
            draws += len(y)
    cells = [[Divergence(*d) for d in zip(s.kl, s.tv, strict=True)] for s in replies.values()]
    withheld = (min_count - 1) * sum(len(s.withheld) for s in replies.values())
    return asdict(bound(errors, draws, [s.counts for s in replies.values()], cells, withheld))
