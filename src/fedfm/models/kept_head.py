"""Assigns the outputs of a checkpoint's own head to the classes, by the names in the checkpoint's configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_UNNAMED = re.compile(r"LABEL_\d+|\d+")  # names that transformers gives to outputs


def arrange(module: nn.Module, head: str, saved: Sequence[str], classes: Sequence[str], name: str) -> tuple[str, ...]:
    """Put the outputs of a kept head in the order of the classes; return a notice if they have other names.

    Args:
        head: path of the last linear map.
        saved: names of the outputs in the checkpoint; () if the checkpoint names none.
        classes: the rows' classes; their number equals that of the head's outputs.
        name: the model's name, for messages.
    """
    if tuple(saved) == tuple(classes):
        return ()
    last: Any = module.get_submodule(head)
    if sorted(saved) == sorted(classes):
        order = [list(saved).index(c) for c in classes]
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.copy_(parameter[order].clone())
        return ()
    known = saved and not all(_UNNAMED.fullmatch(s) for s in saved)
    theirs = ", ".join(saved) if known else "without names"
    return (
        f"model.name: the outputs of the head of {name!r} are {theirs:.80}; they are taken as "
        f"{', '.join(classes):.80}, in this order",
    )
