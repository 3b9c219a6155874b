"""Necessary conditions on sums over rows, so that a server refuses sums that no rows have.

A client can always send the sums of rows that it does not have. But the sums of any rows have whole numbers of rows,
and the scatter sum_c sum_(x in c) (x - m_c)(x - m_c)^T within classes has no negative eigenvalue, by Cauchy and
Schwarz. Sums over several clients satisfy the same conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedfm.aggregation.mean import Mean
from fedfm.core.client import Update
from fedfm.core.federation import Federation
from fedfm.errors import E_FIELD, E_WEIGHT, ClientFault, RunError
from fedfm.linalg.params import Params
from fedfm.methods._opposite_sums import name_opposite

_TOLERANCE = 1e-6  # relative error of the sums: float32, or fixed-point numbers under secure aggregation


def check_part(update: Update, why: str | None) -> None:
    """Refuse one client's sums.

    Args:
        why: what is wrong with the sums; None if rows can have them.

    Raises:
        ClientFault: no rows can have the sums, or they have another weight than 1, which would scale all others' sums.
    """
    if update.weight != 1.0:
        raise ClientFault(E_WEIGHT, f"weight {update.weight:g}: sums over rows have weight 1")
    if why:
        raise ClientFault(E_FIELD, f"no rows can have these sums: {why}")


def check_total(fed: Federation, total: Params, why_not: Callable[[Params], str | None]) -> None:
    """Refuse the sums of all clients, unless noise, clipping, a robust rule or 32-bit numbers have changed them.

    Raises:
        RunError: no rows can have the sums.
    """
    rule = fed.aggregator
    changed = getattr(rule, "clip_norm", None) is not None or getattr(rule, "compact", False)
    if isinstance(rule, Mean) and not changed and not rule.mechanism.withholds and (why := why_not(total)):
        raise RunError(f"round {fed.round}: no rows can have the clients' sums, so a client has sent false ones: {why}")
    name_opposite(fed)


def why_no_counts(count: Tensor) -> str | None:
    """Why these (C,) are not numbers of rows."""
    off = (count - count.round()).abs()
    if bool((count < -_TOLERANCE).any() | (off > _TOLERANCE * (1 + count.abs())).any()):
        return f"expected whole numbers of rows, and they are {count.min():.6g} to {count.max():.6g}"
    return None


def why_no_sums(sums: Mapping[str, Tensor]) -> str | None:
    """Why no rows have these sums.

    Args:
        sums: by class ``count`` (C,) and ``total`` (C, d), and maybe ``second`` moments: the squares (C, d), the lower
            triangles of sum x x^T by class (C, d (d + 1) / 2), or that of all rows (d (d + 1) / 2,).
    """
    count, total = sums["count"].double(), sums["total"].double()
    if why := why_no_counts(count):
        return why
    count = count.round()
    if bool((total[count == 0].abs() > _TOLERANCE * (1 + total.abs().max())).any()):
        return "a class without rows has a sum of features"
    if (second := sums.get("second")) is None:
        return None
    return _why_no_moments(count, total, second.double())


def _why_no_moments(count: Tensor, total: Tensor, second: Tensor) -> str | None:
    d, mean = total.shape[1], total / count.clamp_min(1)[:, None]
    if second.shape == total.shape and d > 1:
        slack = _TOLERANCE * (1 + second.abs())
        wrong = bool((second - total * mean < -slack).any() | (second[count == 0].abs() > _TOLERANCE).any())
        return "sums of squares are below those of the means" if wrong else None
    rows, columns = torch.tril_indices(d, d)
    for moments, of, means in [(second, total, mean)] if second.dim() == 1 else zip(second, total, mean, strict=True):
        scatter = total.new_zeros(d, d)
        scatter[rows, columns] = scatter[columns, rows] = moments
        largest = float(scatter.diagonal().max())
        scatter -= of.reshape(-1, d).T @ means.reshape(-1, d)
        scatter.diagonal().add_(_TOLERANCE * (1 + abs(largest)))
        if int(torch.linalg.cholesky_ex(scatter).info):
            return "the scatter of features within classes has a negative eigenvalue"
    return None
