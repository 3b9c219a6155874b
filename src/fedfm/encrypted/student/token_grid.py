"""Change the number of tokens of a vision transformer, by another image size or by dropping its class token.

Encrypted tokens take as many places as the next power of two. A ViT at 224 pixels has 196 patches and a class token,
which take 256; with 64 patches four times as many pictures share a ciphertext. The linear maps of a ViT accept any
number of tokens. Only the position embeddings depend on the grid.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfm.errors import InputError
from fedfm.models.model import Model
from fedfm.models.quiet import quiet

_TYPES = ("vit", "deit", "ijepa")
_OTHER = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "pooler_output_size")


def with_tokens(model: Model, side: int | None, class_token: bool) -> nn.Module:
    """Make a new module with the weights of a ViT, DeiT or I-JEPA, for images of ``side`` x ``side`` pixels.

    Position embeddings of patches are interpolated (bicubic); those of class tokens stay. Without class tokens, the new
    module has the type ``ijepa``, whose head reads the mean over the patches. So its initial outputs differ from the
    model's.

    Args:
        side: image size; None for the model's own size.
        class_token: whether the new module keeps class tokens.

    Raises:
        InputError: the model has another type, its patches do not divide the side, or it has no class token to drop.
    """
    import transformers

    module: Any = model.module
    config, kind = module.config, module.config.model_type
    if kind not in _TYPES:
        what = "distil.image_size" if class_token else "distil.class_token = false"
        raise InputError(f"{what}: a model of type {kind!r} cannot change its tokens; expected a ViT, DeiT or I-JEPA")
    embedding: Any = model.parts.embedding
    patches = embedding.patch_embeddings
    height, width = patches.patch_size
    if side is not None and (side % height or side % width):
        raise InputError(
            f"distil.image_size = {side}: expected a multiple of the patch size, {height} x {width} pixels"
        )
    extra = embedding.position_embeddings.shape[1] - patches.num_patches
    if not class_token and not extra:
        raise InputError(f"distil.class_token = false: a model of type {kind!r} has no class token")
    old = tuple(n // p for n, p in zip(patches.image_size, patches.patch_size, strict=True))
    new = old if side is None else (side // height, side // width)
    known = {key: value for key, value in config.to_dict().items() if key not in _OTHER}
    kept = {"image_size": side} if side is not None else {}
    made_config = (type(config) if class_token else transformers.IJepaConfig)(**(known | kept))
    kind_of = type(module) if class_token else transformers.IJepaForImageClassification
    state = dict(module.state_dict())
    if not class_token:
        old_prefix, new_prefix = (f"{c.base_model_prefix}." for c in (type(module), kind_of))
        dropped = ("cls_token", "distillation_token")
        state = {
            new_prefix + name.removeprefix(old_prefix) if name.startswith(old_prefix) else name: tensor
            for name, tensor in state.items()
            if name.rpartition(".")[2] not in dropped
        }
    place = next(name for name in state if name.endswith("position_embeddings"))
    positions = interpolate_positions(state[place], extra, old, new)
    state[place] = positions if class_token else positions[:, extra:]
    with quiet(), torch.random.fork_rng(devices=[]):
        made: nn.Module = kind_of(made_config)
    made.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return made.eval()


def interpolate_positions(positions: Tensor, extra: int, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Interpolate position embeddings (1, extra + h w, d) from one grid (h, w) of patches to another."""
    if old == new:
        return positions.clone()
    grid = positions[:, extra:].float().reshape(1, *old, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :extra].float(), grid.flatten(2).transpose(1, 2)], 1)


def processor_for(processor: Any, side: int | None) -> Any:
    """Return a copy of an image processor that resizes images to ``side`` x ``side`` pixels."""
    if side is None:
        return processor
    settings = {key: value for key, value in processor.to_dict().items() if not key.endswith("_type")}
    settings["size"] = {"height": side, "width": side}
    return type(processor)(**settings)
