"""Check that a model of transformers and its image processor fit semantic segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedfm.errors import InputError

_TYPES = "SegFormer, BEiT, Data2Vec, DPT, MobileNetV2, MobileViT or UperNet"
_TWO = 2  # least number of classes


def fit_config(config: Any, name: str, ignored: int) -> None:
    """Set the number that marks ignored pixels in a configuration, and turn off an auxiliary head.

    The auxiliary head of BEiT, DPT and UperNet adds a term to the loss of transformers, and changes no output.

    Raises:
        InputError: transformers has no semantic segmentation for this type of model, or the masks have only one class.
    """
    import transformers

    kind = f"model.name: {name!r} is of type {config.model_type!r}"
    if type(config) not in transformers.AutoModelForSemanticSegmentation._model_mapping:
        if type(config) in transformers.AutoModelForUniversalSegmentation._model_mapping:
            raise InputError(
                f"{kind}, whose loss matches masks with queries image by image and divides by the masks of a batch, so "
                f"it is not a mean over pixels or rows: take a model with scores for each pixel, such as {_TYPES}, or "
                "a function that computes such scores (docs: how-to/segmentation.md)",
                key="model.name",
            )
        raise InputError(f"{kind}, which has no decoder for pixels in transformers: take {_TYPES}", key="model.name")
    _check_count(config.num_labels)
    if getattr(config, "use_auxiliary_head", False):
        config.use_auxiliary_head = False
    if hasattr(config, "semantic_loss_ignore_index"):
        config.semantic_loss_ignore_index = ignored


def check_processor(processor: Any, name: str) -> None:
    """Refuse an image processor that changes an image's geometry in other ways than resizing it to one size.

    Raises:
        InputError: it crops, pads or keeps the aspect ratio, for example, so that a resized mask would not fit.
    """
    said = processor.to_dict()
    size = dict(said.get("size") or {})
    odd = [f"{key} = true" for key in ("do_center_crop", "do_pad", "keep_aspect_ratio") if said.get(key)]
    odd += ["do_resize = false"] if said.get("do_resize") is False else []
    odd += [f"size = {size}"] if not {"height", "width"} <= size.keys() else []
    if odd:
        raise InputError(
            f"model.name: the image processor of {name!r} has {', '.join(odd)}, and masks are resized to one size with "
            'their images: set do_center_crop and do_pad to false and size = {"height": 512, "width": 512} in its '
            "preprocessor_config.json",
            key="model.name",
        )


def check_outputs(name: str, found: Sequence[int], images: Sequence[int], classes: int) -> None:
    """Refuse outputs (shape ``found``) of a user's module that are not logits of classes for pixels of its images.

    Raises:
        InputError: the shape is wrong, or the masks have only one class.
    """
    _check_count(classes)
    n, _, height, width = images
    right = len(found) == len(images) and tuple(found[:2]) == (n, classes)
    if not right or not 0 < found[2] <= height or not 0 < found[3] <= width:
        raise InputError(
            f"model.name: for images ({', '.join(map(str, images))}) the module of {name} returns "
            f"({', '.join(map(str, found))}): expected ({n}, {classes}, height, width), logits of the {classes} "
            f"classes, with a height up to {height} and a width up to {width}",
            key="model.name",
        )


def _check_count(classes: int) -> None:
    if classes < _TWO:
        raise InputError("data.mask: the masks hold one class, and a model learns at least two: background is one, too")


def keep_numbers(processor: Any) -> None:
    """Let an export's image processor keep the numbers of masks, as in training (``do_reduce_labels = False``)."""
    if getattr(processor, "do_reduce_labels", False):
        processor.do_reduce_labels = False
