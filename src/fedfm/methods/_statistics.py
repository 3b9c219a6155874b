"""Batch norm's running statistics under a server optimiser: they are averaged, not optimised."""

from __future__ import annotations

from fedfm.linalg.params import Params
from fedfm.models.model import Model


def with_averaged_statistics(model: Model, x: Params, w: Params, delta: Params) -> Params:
    """``x`` with its untrained entries, running means and variances, replaced by those of w + Delta.

    The rules of server optimisers are for gradients. A step of Adam is at most about eta long, so statistics would lag
    rounds behind the weights; momentum carries a variance past the clients' own, even below 0.

    ``x`` is the model after the server's step, ``w`` what the clients started from, ``delta`` their mean update.
    """
    trained = model.live()
    rest = [name for name in x if name not in trained]
    return x.replace(w.only(rest) + delta.only(rest)) if rest else x
