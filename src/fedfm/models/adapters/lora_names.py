"""LoRA parameters by their names: the pairs of factors, their rank, and the other trained tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

DOWN, UP = ".lora_A.", ".lora_B."  # parts of the names of the factors A and B


def pairs(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Names of the factors A (r, d_in) and B (d_out, r) of each adapted module, by its path, in the order of ``names``.

    The factors of experts are A (E, r, d_in) and B (d_out, r, E), see :mod:`fedfm.models.adapters.stacked`.

    Example:
        >>> pairs(["q.lora_A.default.weight", "q.lora_B.default.weight", "head.weight"])
        {'q': ('q.lora_A.default.weight', 'q.lora_B.default.weight')}
    """
    names = list(names)
    known = set(names)
    return {
        name.partition(DOWN)[0]: (name, b) for name in names if DOWN in name and (b := name.replace(DOWN, UP)) in known
    }


def rest(names: Iterable[str]) -> list[str]:
    """Names of the trained tensors that are not LoRA's, e.g. of a new head."""
    return [name for name in names if DOWN not in name and UP not in name]


def rank_of(w: Mapping[str, Tensor]) -> int | None:
    """The rank r of LoRA parameters; None if there are none, or if ranks differ between modules."""
    ranks = {w[b].shape[1] for _, b in pairs(w).values()}
    return ranks.pop() if len(ranks) == 1 else None
