"""Finds settings of a model's image processor that are probably mistakes, or on which its files differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.models.locate import stored_table

if TYPE_CHECKING:
    from torch import nn

    from fedfm.models.images import Preprocess

_ALONE, _WHOLE = "preprocessor_config.json", "processor_config.json"
_NUMBERS = ("do_resize", "size", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "crop_size")
_TABLES = ("position_embedding", "pos_embed", "relative_position_bias_table")
_ANY_SIZE = ("dinov2",)  # model types whose files have positions for another image size than that of the processor


def settings(path: Path | str) -> dict[str, dict[str, Any]]:
    """The settings of the image processor by file; if there are two files, transformers uses the last one."""
    found = {_ALONE: stored_table(path, _ALONE), _WHOLE: stored_table(path, _WHOLE).get("image_processor")}
    return {name: table for name, table in found.items() if isinstance(table, dict) and table}


def notices(path: Path | str, processor: Any) -> list[str]:
    """Notices about settings that differ between two files, and about a mean that is not used although it is set."""
    tables = settings(path)
    found = [*_differences(tables)]
    last = next(reversed(tables.values()), {})
    normalises = getattr(type(processor), "do_normalize", None) is True
    if normalises and last.get("do_normalize") is False and last.get("image_mean") is not None:
        found.append(
            f"has do_normalize = false in its {next(reversed(tables))}, so that image_mean = {last['image_mean']} and "
            "image_std are not used: set do_normalize = true if the model was trained with them"
        )
    return found


def of_other_size(image: Preprocess, module: nn.Module, config: Any, name: str) -> list[str]:
    """A notice if prepared images have another size than the size for which the model has learned positions.

    Such a model interpolates its table of positions, and is less accurate than at the size of its training.
    """
    from PIL import Image

    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", None)
    if side is None or config.model_type.startswith(_ANY_SIZE):
        return []
    sides = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    if not any(table in path for path, _ in module.named_parameters() for table in _TABLES):
        return []
    shape = tuple(image([Image.new("RGB", (sides[1], sides[0]))]).shape[-2:])
    if shape == sides:
        return []
    return [
        f"model.name: images become {shape[1]} x {shape[0]} pixels in the image processor of {name!r}, and the model "
        f"has positions for {sides[1]} x {sides[0]} (image_size of its config.json): set the size in its "
        "preprocessor_config.json to that of the model's training"
    ]


def _differences(tables: dict[str, dict[str, Any]]) -> Iterator[str]:
    if len(tables) < len((_ALONE, _WHOLE)):
        return
    alone, whole = tables[_ALONE], tables[_WHOLE]
    odd = [key for key in _NUMBERS if key in alone and key in whole and alone[key] != whole[key]]
    if odd:
        said = ", ".join(f"{key} {alone[key]!r} and {whole[key]!r}" for key in odd)
        yield f"has an image processor in {_ALONE} and in {_WHOLE}, and only the second is used; they differ: {said}"
