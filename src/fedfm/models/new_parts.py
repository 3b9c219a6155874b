"""Checks that the randomly initialised part of a model is no larger than a head.

The structure of model and checkpoint decides which parts are new (:mod:`.heads`, :mod:`.checkpoint`). This module
measures the size of the new parts, and refuses a model if they are as large as an encoder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from fedfm.errors import InputError
from fedfm.models.checkpoint import some
from fedfm.models.heads import labels_pixels, output_maps, within
from fedfm.models.quantised_maps import maps

FEW = 0.05  # largest share of a model's parameters that may be new without a notice
_DENSE = 2  # largest number of matrices before the last map of a head in transformers: of a pooler and a dense layer


def notice(module: nn.Module, new: Collection[str], head: str, name: str) -> tuple[str, ...]:
    """A notice if more than a few per cent of the parameters are new; else ().

    Args:
        module: a classifier before its adaptation.
        new: paths of its new modules.
        head: path of its last map; "" if it has none.
        name: the model's name, for messages.

    Raises:
        InputError: more than a few per cent are new, even if the last maps and two dense layers do not count.
    """
    total, made = _numbers(module), {path: _numbers(module.get_submodule(path)) for path in new}
    count = sum(made.values())
    if count <= FEW * total:
        return ()
    parts = some(sorted(made, key=lambda path: -made[path]))
    share = f"{100 * count / total:.0f} % of the parameters of {name!r}, {count:,} of {total:,},"
    if count - _of_a_head(module, new, head) > FEW * total:
        raise InputError(
            f"model.name: {share} would be new and untrained, which is more than a head: {parts}; expected weights "
            "that have these parts",
            key="model.name",
        )
    return (f"model.name: {share} are new here and untrained: {parts}",)


def _of_a_head(module: nn.Module, new: Collection[str], head: str) -> int:
    """Number of new values that belong to a head: vectors, last maps, and dense layers of the last map's width.

    The last maps are ``head`` and those of :func:`output_maps`, which finds none without a ``num_labels``.
    """
    if labels_pixels(module):  # the decoder is the head; it is new if the weights are those of an encoder alone
        return sum(_numbers(m) for path, m in _leaves(module, new) if within(path, head) and not any(m.children()))
    outputs = {head, *output_maps(module)}
    width = getattr(module.get_submodule(head), "in_features", 0) if head else 0
    count, dense = 0, list[int]()
    for path, part in _leaves(module, new):
        for parameter in part.parameters(recurse=False):
            if parameter.dim() < 2 or path in outputs:
                count += parameter.numel()
            elif parameter.dim() == 2 and width in parameter.shape:
                dense.append(parameter.numel())
    return count + sum(sorted(dense)[:_DENSE])


def _leaves(module: nn.Module, new: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    return ((path, part) for path, part in module.named_modules() if any(within(path, outer) for outer in new))


def _numbers(module: nn.Module) -> int:
    """Number of values of a module; in a quantised map, the values after dequantisation are counted."""
    bits = [(m, m.in_features * m.out_features) for _, m in maps(module)]
    packed = sum(m.weight.numel() for m, _ in bits)
    return int(sum(p.numel() for p in module.parameters()) - packed + sum(size for _, size in bits))
