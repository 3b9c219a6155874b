"""The two experts of FedMS on one client's rows, and their mixture (equation 6)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.models.dual_encoder import DualModel, boundary_states, top, trunk_images
from fedfm.models.layers import layers
from fedfm.models.model import Model

TRUNK = "trunk."  # names of the gate's own image block


class Experts:
    """The cosines of both experts on one client's rows. What is the same for both is computed once."""

    def __init__(self, model: DualModel, W_g: Params, rows: Rows, k: int) -> None:
        self.model, self.k, self.W_g, self.rows = model, k, W_g, rows
        self.states = boundary_states(model, W_g, rows, k)
        model.load(W_g)
        with torch.no_grad():
            V_g, self.T_g = top(model, self.states, k, train=False)
        self.V_g = V_g

    def seen(self, index: np.ndarray, trunk: Mapping[str, Tensor]) -> Tensor:
        """What the gate adapter sees of these rows, (b, d): V_g, or what the gate's own trunk gives."""
        if not trunk:
            return self.V_g[index]
        below = boundary_states(self.model, self.W_g, self.rows.take(index), 1).images
        return trunk_images(self.model, self.W_g, {n.removeprefix(TRUNK): t for n, t in trunk.items()}, below)

    def cosines(self, index: np.ndarray, *, train: bool) -> tuple[Tensor, Tensor]:
        """(<V_g, T_g>, <V_i, T_i>), (b, C) each; of the local expert as the model has it now."""
        V_i, T_i = top(self.model, self.states.take(index), self.k, train=train)
        return self.V_g[index] @ self.T_g.T, V_i @ T_i.T


def differing(model: Model, W_g: Params, W_i: Params) -> int:
    """How many of the top layers hold every difference between the experts: below them both compute the same."""
    encoders = model.parts.encoders
    changed = {
        layer for layer, names in layers(model, "layer").items() if any(bool((W_g[n] != W_i[n]).any()) for n in names)
    }
    depths = [len(blocks) - i for blocks in encoders for i, (path, _) in enumerate(blocks) if path in changed]
    return max(depths, default=1)


def mixed(lam: Tensor, of_g: Tensor, of_i: Tensor) -> Tensor:
    """O of equation 6: lambda <V_g, T_g> + (1 - lambda) <V_i, T_i>, for lambda (b,) and cosines (b, C)."""
    return lam[:, None] * of_g + (1 - lam)[:, None] * of_i
