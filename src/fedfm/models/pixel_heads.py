"""Find the decoder of a model for semantic segmentation, and the decoder's map to the outputs of each pixel."""

from __future__ import annotations

from torch import nn

from fedfm.errors import InputError

_NAMES = ("decode_head", "segmentation_head", "head")  # attributes of transformers' classes


def pixel_head(module: nn.Module) -> str:
    """Path of the decoder; "" if the module has none."""
    return next((name for name in _NAMES if hasattr(module, name)), "")


def pixel_map(module: nn.Module, head: str) -> str:
    """Path of the decoder's convolution to the classes. It has one output per class, and only this layer is always new.

    It is the decoder's ``classifier``, which BEiT and UperNet define before the layers that it follows, and else the
    last convolution. The other layers of a trained decoder fit any classes, so they keep their weights.

    Raises:
        InputError: the decoder has no such convolution.
    """
    inside = f"{head}." if head else ""
    maps = [(p, m) for p, m in module.named_modules() if isinstance(m, nn.Conv2d) and p.startswith(inside)]
    count = getattr(getattr(module, "config", None), "num_labels", None)
    maps = [(p, m) for p, m in maps if p == f"{inside}classifier"] or maps
    if not maps or maps[-1][1].out_channels != count:
        raise InputError(
            f"model.name: the last layer of {type(module).__name__} is not a convolution with one output per class",
            key="model.name",
        )
    path: str = maps[-1][0]
    return path
