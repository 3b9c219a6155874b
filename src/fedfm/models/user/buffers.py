"""Finds buffers of a user's module that training changes, although no message has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedfm.core.text import listing
from fedfm.models.model import BATCH_NORMS, Model
from fedfm.models.user.gradients import in_training
from fedfm.models.wrap import WrappedModel

_NAMED = 2  # number of names that a notice lists


def keep(model: WrappedModel, loss: Callable[[], Tensor]) -> tuple[str, ...]:
    """Set buffers that a training step changes back before each client; notices about them and frozen batch norm.

    Args:
        loss: computes the loss of a few rows.
    """
    norms = [(name, m) for name, m in model.module.named_modules() if isinstance(m, BATCH_NORMS)]
    found = tuple(text for text in (_notice_of_frozen(model, norms),) if text)
    own = [id(buffer) for _, m in norms for buffer in m.buffers(recurse=False)]
    others = {
        (name, key): (part, buffer)
        for name, part in model.module.named_modules()
        for key, buffer in part.named_buffers(recurse=False)
        if id(buffer) not in own
    }
    if not others:
        return found
    before = {place: buffer.clone() for place, (_, buffer) in others.items()}
    try:
        with in_training(model), torch.no_grad():
            loss()
            now = {place: part._buffers[place[1]] for place, (part, _) in others.items()}
            moved = [place for place, value in before.items() if not _is_same(now[place], value)]
    except Exception:  # the user's own code may need more rows; training names the error
        return found
    finally:
        for place, (part, buffer) in others.items():
            part._buffers[place[1]] = buffer
    if not moved:
        return found
    model.reset_buffers = tuple(
        (part, place[1], buffer, before[place]) for place, (part, buffer) in others.items() if place in moved
    )
    names = [f"{name}.{key}" if name else key for name, key in moved]
    one = len(moved) == 1
    return (
        *found,
        f"{len(moved)} buffer{'' if one else 's'} of the module change{'s' if one else ''} in training, and no message "
        f"has {'it' if one else 'them'}: {listing(names, _NAMED)}; each client begins with what the "
        "module had before the run, and so does each evaluation",
    )


def _is_same(now: Tensor | None, before: Tensor) -> bool:
    return now is not None and now.shape == before.shape and torch.equal(now, before)


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
