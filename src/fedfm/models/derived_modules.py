"""Derived modules: those of transformers in which a wing has replaced parts, as a table in ``config.json`` says.

A derived model is a folder like any other of transformers with one more key in its configuration. The wing's module
that knows the key is imported when a model has it, so that no other model pays for it. What is put into a module and
holds for a bounded range of arguments alone is a :class:`Bounded`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.models import families

INSTALLERS = {  # key of config.json -> the module whose ``install(module, config)`` knows its table
    "fedfm_polynomials": "fedfm.encrypted.student.conversion",
}


class Bounded(nn.Module):
    """A function that holds on an interval: in training its arguments are clamped, in evaluation they are counted.

    Attributes:
        hinged: add up ``penalty`` in training mode. It holds all that it came from, until it is dropped.
        penalty: mean squared excess of the arguments over the part of their intervals where no penalty grows.
        outside, total: arguments outside their interval, and all, of evaluation mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hinged = False
        self.penalty: Tensor | None = None
        self.outside = self.total = 0


def _key(module: Any) -> str:
    """The key of its configuration that says how this module, also under PEFT, is derived; empty if it is not."""
    config = getattr(families.unwrap(module), "config", None)
    return next((key for key in INSTALLERS if getattr(config, key, None) is not None), "")


def is_derived(module: Any) -> bool:
    """Whether parts of a module, also under PEFT, are replaced as its ``config.json`` says."""
    return bool(_key(module))


def install(module: nn.Module) -> None:
    """Put the parts of its ``config.json`` into a module that was loaded with the usual ones; others stay as they are.

    Raises:
        InputError: the table is damaged, or is of another model.
    """
    if key := _key(module):
        import_module(INSTALLERS[key]).install(module, module.config)


def table(module: Any) -> Mapping[str, Any]:
    """What ``config.json`` says of a module that :func:`is_derived`."""
    return getattr(families.unwrap(module).config, _key(module))  # type: ignore[no-any-return]


def hinge(modules: Collection[Bounded]) -> None:
    """Begin to add up penalties, from zero."""
    for module in modules:
        module.penalty, module.hinged = None, True


def penalties(modules: Collection[Bounded]) -> Tensor:
    """The sum of what was added up since :func:`hinge`, a scalar; the modules drop it, and what it came from."""
    found = [module.penalty for module in modules if module.penalty is not None]
    for module in modules:
        module.penalty = None
    return torch.stack(found).sum() if found else torch.zeros(())


def violations(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Path of each bounded function -> (arguments outside its interval, all), in evaluation since the last count."""
    return {name: (m.outside, m.total) for name, m in module.named_modules() if isinstance(m, Bounded)}
