"""Image preprocessing by plain settings: for clients without the model, and for models without a processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.errors import InputError
from fedfm.models.images import Preprocess
from fedfm.models.preprocessing import processor_call

_KEYS = (
    *("do_convert_rgb", "do_resize", "size", "resample", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std"),
)


def settings_of(processor: Any) -> dict[str, Any]:
    """The settings with which a client without the model can prepare images like ``processor``.

    Raises:
        InputError: the processor does more than resize, rescale and normalise.
    """
    kind = type(processor).__name__
    if not kind.startswith("ViTImageProcessor"):
        raise InputError(
            f"a client without the model cannot prepare images as a {kind} does: expected a ViT's processor"
        )
    found = {key: value for key, value in processor.to_dict().items() if key in _KEYS and value is not None}
    return {key: dict(value) if key == "size" else value for key, value in found.items()}


def call_from(how: Mapping[str, Any]) -> Preprocess:
    """The preprocessing that :func:`settings_of` describes."""
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    return processor_call(ViTImageProcessorPil(**{key: value for key, value in how.items() if key in _KEYS}))


def plain_call(size: int, mean: Sequence[float], std: Sequence[float]) -> Preprocess:
    """The preprocessing of models without a processor: resize to ``size`` (bilinear), divide by 255, normalise."""

    def call(pictures: list[Any]) -> Tensor:
        from PIL import Image

        side = (size, size)
        array = np.stack(
            [np.asarray(p if p.size == side else p.resize(side, Image.Resampling.BILINEAR)) for p in pictures]
        )
        x = torch.from_numpy(array.astype(np.float32) / 255).permute(0, 3, 1, 2)  # (n, 3, H, W)
        return ((x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]).contiguous()

    call.settings = (size, tuple(mean), tuple(std))  # type: ignore[attr-defined] # for fingerprints
    return call
