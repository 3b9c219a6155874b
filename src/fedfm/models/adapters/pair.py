"""Two adapters of one client as one vector: the federation's, its own, and by what weight a row's output mixes them.

The client's own adapter gets a share a of the output, the federation's 1 - a, with a = bias + <slope, h / |h|>, cut to
[0, 1]: h (d,) is the row's hidden state as :meth:`fedfm.models.model.Model.last_states` gives it. Without a slope all
rows have the bias. The vector holds all of it, so that whoever has it can use it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.linalg.params import Params

GLOBAL, LOCAL, MIX = "global", "local", "mix"


def pair(shared: Params, own: Params, bias: float, slope: Tensor | None = None) -> Params:
    """One vector of the federation's adapter, the client's own, and their weights."""
    mix = {"bias": torch.tensor(bias)} | ({} if slope is None else {"slope": slope})
    return Params.join(**{GLOBAL: shared, LOCAL: own, MIX: Params(mix)})


def is_pair(w: Mapping[str, Tensor]) -> bool:
    """Whether :func:`pair` made it."""
    return f"{MIX}/bias" in w


def by_row(w: Mapping[str, Tensor]) -> bool:
    """Whether each row has a share of its own."""
    return f"{MIX}/slope" in w


def share(mix: Params, states: Tensor) -> Tensor:
    """(n,) the share a of the client's own adapter in the output of rows with these hidden states (n, d)."""
    return (mix["bias"] + F.normalize(states, dim=1) @ mix["slope"]).clamp(0, 1)


def mean_direction(states: Tensor) -> Tensor:
    """(d,) m = mean over s of h_s / |h_s|, of states (S, d): the mean cosine of h to them is <m, h / |h|>."""
    return F.normalize(states, dim=1).mean(0)
