"""Derived modules: transformers modules in which fedfm replaces some parts, as a table in ``config.json`` states.

A derived model is a transformers folder with one more key in its configuration. The Python module that handles the key
is imported only if a model has the key, so that other models do not need the import. A new function that is valid only
for a bounded range of arguments is a :class:`Bounded`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.models import families

INSTALLERS = {  # key of config.json -> the Python module whose ``install(module, config)`` reads the key's table
    "fedfm_polynomials": "fedfm.encrypted.student.conversion",
}


class Bounded(nn.Module):
    """A function that is valid on an interval. Training clamps arguments to it; evaluation counts arguments outside it.

    Attributes:
        hinged: whether ``penalty`` is summed in training mode. The sum keeps its autograd graph alive until
            :func:`penalties` drops the sum.
        penalty: mean squared distance by which arguments exceed the inner part of their intervals; None before the
            first sum.
        outside, total: in evaluation mode, the numbers of arguments outside their interval and of all arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hinged = False
        self.penalty: Tensor | None = None
        self.outside = self.total = 0


def _key(module: Any) -> str:
    """The key of :data:`INSTALLERS` that the configuration of this module (also under PEFT) has; "" if it has none."""
    config = getattr(families.unwrap(module), "config", None)
    return next((key for key in INSTALLERS if getattr(config, key, None) is not None), "")


def is_derived(module: Any) -> bool:
    """Whether ``config.json`` replaces parts of this module (also under PEFT)."""
    return bool(_key(module))


def install(module: nn.Module) -> None:
    """Replace parts of a loaded module as its ``config.json`` states; other modules stay unchanged.

    Raises:
        InputError: the table is damaged, or belongs to another model.
    """
    if key := _key(module):
        import_module(INSTALLERS[key]).install(module, module.config)


def table(module: Any) -> Mapping[str, Any]:
    """The table in a derived module's ``config.json`` that states which parts are replaced."""
    return getattr(families.unwrap(module).config, _key(module))  # type: ignore[no-any-return]


def hinge(modules: Collection[Bounded]) -> None:
    """Start summing penalties from zero."""
    for module in modules:
        module.penalty, module.hinged = None, True


def penalties(modules: Collection[Bounded]) -> Tensor:
    """The sum of penalties since :func:`hinge`, a scalar; the modules drop their penalties and autograd graphs."""
    found = [module.penalty for module in modules if module.penalty is not None]
    for module in modules:
        module.penalty = None
    return torch.stack(found).sum() if found else torch.zeros(())


def violations(module: nn.Module) -> dict[str, tuple[int, int]]:
    """For each bounded function, by path: (arguments outside its interval, all arguments) since the last reset."""
    return {name: (m.outside, m.total) for name, m in module.named_modules() if isinstance(m, Bounded)}
