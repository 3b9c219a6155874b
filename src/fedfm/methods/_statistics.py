"""Batch norm's running statistics beside a server optimiser: what clients measured, averaged, not what they learnt."""

from __future__ import annotations

from fedfm.linalg.params import Params
from fedfm.models.model import Model


def averaged(model: Model, x: Params, w: Params, delta: Params) -> Params:
    """``x`` with w + Delta, the clients' mean, in the place of what nobody trains: running means and variances.

    A server optimiser's rule is for gradients. Adam's step is at most about eta long however far the statistics moved,
    which leaves them rounds behind the weights, and momentum carries a variance past the clients' own, even below 0.

    Args:
        model: its ``live()`` is what is trained.
        x: (P,) the model after the server's step.
        w: (P,) the model that the clients started from.
        delta: (P,) their mean update.
    """
    trained = model.live()
    rest = [name for name in x if name not in trained]
    return x.replace(w.only(rest) + delta.only(rest)) if rest else x
