"""Averages the running statistics of batch norm, since a server's optimiser is for trained weights only."""

from __future__ import annotations

from fedfm.linalg.params import Params
from fedfm.models.model import Model


def with_averaged_statistics(model: Model, x: Params, w: Params, delta: Params) -> Params:
    """Replace the untrained entries of ``x`` (running means and variances) by those of w + Delta.

    Server optimisers expect gradients, and running statistics have none. A step of Adam is at most about eta long, so
    the statistics would lag several rounds behind the weights. Momentum can push a variance beyond the clients' values,
    even below 0. ``x`` is the model after the server's step, ``w`` the clients' start, ``delta`` their mean update.
    """
    trained = model.live()
    rest = [name for name in x if name not in trained]
    return x.replace(w.only(rest) + delta.only(rest)) if rest else x
