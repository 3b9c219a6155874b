"""Notices about buffers of a user's module that training changes, although no message has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedfm.core.text import listing
from fedfm.models.model import BATCH_NORMS, Model
from fedfm.models.user.gradients import in_training

_NAMED = 2  # number of names that a notice lists


def notices(model: Model, loss: Callable[[], Tensor]) -> tuple[str, ...]:
    """Notices about frozen batch norm whose statistics change, and about other buffers that a training step changes.

    Args:
        loss: computes the loss of a few rows.
    """
    norms = [(name, m) for name, m in model.module.named_modules() if isinstance(m, BATCH_NORMS)]
    found = tuple(text for text in (_notice_of_frozen(model, norms),) if text)
    own = [id(buffer) for _, m in norms for buffer in m.buffers(recurse=False)]
    others = {name: buffer for name, buffer in model.module.named_buffers() if id(buffer) not in own}
    if not others:
        return found
    before = {name: buffer.clone() for name, buffer in others.items()}
    try:
        with in_training(model), torch.no_grad():
            loss()
            moved = [name for name, buffer in others.items() if not torch.equal(buffer, before[name])]
    except Exception:  # the user's own code may need more rows; training names the error
        return found
    if not moved:
        return found
    one = len(moved) == 1
    return (
        *found,
        f"{len(moved)} buffer{'' if one else 's'} of the module change{'s' if one else ''} in training, and no message "
        f"has {'it' if one else 'them'}: {listing(moved, _NAMED)}; a client goes on with what the client before it in "
        "its process left, so that results may depend on run.workers",
    )


def _notice_of_frozen(model: Model, norms: Sequence[tuple[str, nn.Module]]) -> str:
    """A notice if batch norm has frozen weights, and running statistics that change all the same; "" if none has."""
    trained = {*map(id, model.train_too)}
    names = [
        name
        for name, m in norms
        if id(m) in trained
        and getattr(m, "track_running_stats", False)
        and (weights := [*m.parameters(recurse=False)])
        and not any(w.requires_grad for w in weights)
    ]
    if not names:
        return ""
    return (
        f"the weights of {len(names)} layers of batch norm are frozen, and their running statistics change in "
        f"training: {listing(names, _NAMED)}; to keep these, let the module's train() put the layers into eval()"
    )
