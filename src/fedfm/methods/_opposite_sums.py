"""Names silos whose class means point away from those of the others, if the server sees each silo's sums.

The negative of a silo's sums of features, with true counts, satisfies every necessary condition on sums over rows, see
:mod:`fedfm.methods._sums_of_rows`. Only a comparison with the other silos shows it. What differs between two classes is
compared, since rows of another scanner or style move the means of all classes alike. A silo is named, and not left out:
its labels may mean something else, and no test tells this from a lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedfm.core.client import ClientId
from fedfm.core.federation import Federation

KEY = "class means"  # key in ``fed.process_memory``
_ROWS = 10  # least number of rows of a class whose mean is compared
_SILOS = 4  # least number of silos: the median of three may be that of one honest silo
_CHANCE = 1e-6  # largest probability that a silo is named whose means point anywhere
_LEAST = 0.5  # least cosine between a silo and the median of all, for a statement on any other silo
_MOST_BYTES = 1 << 28  # largest size of all kept means
_NAMED = 5  # number of silos that a notice names


@dataclass
class KeptMeans:
    """Class means by silo in a round; ``left_out`` is the number of silos for which there was no room."""

    round: int
    means: dict[ClientId, Tensor] = field(default_factory=dict)
    left_out: int = 0


def keep(fed: Federation, client: ClientId, count: Tensor, total: Tensor) -> None:
    """Keep a silo's class means until :func:`name_opposite`, from counts (C,) and sums of features (C, d)."""
    kept = fed.process_memory.get(KEY)
    if kept is None or kept.round != fed.round:
        kept = fed.process_memory[KEY] = KeptMeans(fed.round)
    if 4 * total.numel() * (len(kept.means) + 1) > _MOST_BYTES:
        kept.left_out += 1
        return
    means = (total / count.clamp_min(1)[:, None]).float()
    means[count.round() < _ROWS] = torch.nan
    kept.means[client] = means


def name_opposite(fed: Federation) -> None:
    """Say which silos' class means point away from those of the others."""
    kept = fed.process_memory.pop(KEY, None)
    if kept is None or kept.round != fed.round:
        return
    if kept.left_out:
        fed.notice(f"the class means of {kept.left_out} silos were not compared with those of the others: no room")
    if found := find_opposite(kept.means):
        names = ", ".join(f"{client} (cosine {cosine:.2f})" for client, cosine in sorted(found.items())[:_NAMED])
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        listed = ", ".join(f'"{client}"' for client in sorted(found))
        fed.notice(
            f"the means of classes point away from those of the other silos: {names}{more}. Such a silo sent sums of "
            "the wrong sign, or its labels mean something else; the result has its sums. A run without them: "
            f"--set 'data.without=[{listed}]'"
        )


def find_opposite(means: Mapping[ClientId, Tensor]) -> dict[ClientId, float]:
    """The silos whose class means point away from the median of all, with the cosine.

    A silo is named if the cosine is so low that a direction drawn at random has it with probability ``_CHANCE`` over
    all silos, and if more than half of the silos agree with the median. Rows of fewer than four silos, or of fewer than
    two classes in common, say nothing.

    Args:
        means: (C, d) by silo; NaN where the silo has too few rows of the class.
    """
    if len(means) < _SILOS:
        return {}
    stacked = torch.stack([*means.values()])  # (K, C, d)
    held = ~stacked.isnan().any(2)  # (K, C)
    middle, common = stacked.nanmedian(0).values, held.sum(0) >= _SILOS
    cosines = {c: _cosine(own, middle, has & common) for c, own, has in zip(means, stacked, held, strict=True)}
    known = {client: found for client, found in cosines.items() if found is not None}
    agree = sum(cosine >= _LEAST for cosine, _ in known.values())
    if len(known) < _SILOS or 2 * agree <= len(known):
        return {}
    limits = limits_of([size for _, size in known.values()], _CHANCE / len(known))
    return {c: cosine for (c, (cosine, _)), limit in zip(known.items(), limits, strict=True) if cosine <= -limit}


def _cosine(own: Tensor, middle: Tensor, shared: Tensor) -> tuple[float, int] | None:
    """The cosine of the differences between classes, and their number of dimensions; None without two classes."""
    classes = int(shared.sum())
    if classes < 2:
        return None
    a, b = (part[shared].double() - part[shared].double().mean(0) for part in (own, middle))
    scale = float(a.norm() * b.norm())
    return (float((a * b).sum()) / scale, (classes - 1) * own.shape[1]) if scale > 0 else None


def limits_of(sizes: Sequence[int], chance: float) -> list[float]:
    """The t at least 0.5 with P(cosine <= -t) <= chance, for a uniform direction in each number of dimensions.

    The square of the cosine has the distribution Beta(1/2, (D - 1)/2); in one dimension the limit is above 1.
    """
    from scipy.special import betainccinv

    return [2.0 if D < 2 else max(float(betainccinv(0.5, (D - 1) / 2, 2 * chance)) ** 0.5, _LEAST) for D in sizes]
