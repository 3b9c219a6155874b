"""An image classifier from an encoder for which transformers has no classification class, such as DINOv3 or MAE.

A new linear head reads one vector per image: the encoder's own ``pooler_output``, else its class token, else the
mean over its positions.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.errors import InputError, first_line

POOLER, CLASS_TOKEN, MEAN = "pooler_output", "class token", "mean over positions"


class PooledEncoder(nn.Module):
    """An encoder of transformers and a linear head.

    Attributes:
        config: the encoder's configuration.
        pooling: the part of the encoder's output that the head reads.
    """

    base_model_prefix = "encoder"  # transformers' classes have this attribute; PEFT reads it

    def __init__(self, encoder: Any, pooling: str, width: int, classes: int) -> None:
        super().__init__()
        self.config, self.pooling = encoder.config, pooling
        self.config.num_labels = classes
        self.encoder = encoder
        self.classifier = nn.Linear(width, classes, dtype=encoder.dtype)

    def get_output_embeddings(self) -> None:
        """Return None, because the model predicts no words."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Images (b, 3, H, W) -> logits (b, C)."""
        pooled = _pool(_output(self.encoder, pixel_values), self.pooling)
        return self.classifier(pooled)  # type: ignore[no-any-return]


def as_code(pooling: str, unit: bool) -> list[str]:
    """Lines of Python that build the classifier from an export's ``FOLDER`` with torch and transformers alone.

    Args:
        pooling: as in :class:`PooledEncoder`.
        unit: whether the pooled vector is divided by its Euclidean norm before the head.
    """
    return f"""\
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel


class Classifier(torch.nn.Module):
    def __init__(self, config, width, classes):
        super().__init__()
        self.encoder = AutoModel.from_config(config)
        self.classifier = torch.nn.Linear(width, classes)

    def forward(self, pixel_values):
        {_INDENT.join(_CODE[pooling])}
        return self.classifier({"torch.nn.functional.normalize(pooled)" if unit else "pooled"})


weights = load_file("FOLDER/model.safetensors")
head = weights["classifier.weight"]
model = Classifier(AutoConfig.from_pretrained("FOLDER/encoder"), head.shape[1], head.shape[0])
model.to(head.dtype).load_state_dict(weights)
model.eval()""".splitlines()


_INDENT = "\n        "
_STATES = "states = self.encoder(pixel_values=pixel_values).last_hidden_state"
_CODE = {  # the computation of _pool, as text
    POOLER: ("pooled = self.encoder(pixel_values=pixel_values).pooler_output",),
    CLASS_TOKEN: (_STATES, "pooled = states[:, 0]"),
    MEAN: (_STATES, "pooled = states.mean((2, 3)) if states.dim() == 4 else states.mean(1)"),
}


def has_encoder(config: Any) -> bool:
    """Whether transformers has an encoder for this configuration that reads only images."""
    import transformers

    found = transformers.AutoModel._model_mapping.get(type(config), None)
    return getattr(found, "main_input_name", "") == "pixel_values" and "input_ids" not in _arguments(found)


def sees_all(config: Any) -> None:
    """Switch off the random masking of patches in the encoder's configuration."""
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0


def pooling_of(skeleton: Any, pixels: Tensor, name: str) -> tuple[str, int]:
    """The kind of vector that a head can read from an encoder, and the vector's width d.

    Args:
        skeleton: the encoder, on any device; on ``meta`` it computes only shapes.
        pixels: two prepared images (2, 3, H, W).
        name: the encoder's name, for messages.

    Raises:
        InputError: the encoder does not give one vector for each image.
    """
    parameter = next(skeleton.parameters())
    try:
        with torch.no_grad():
            output = _output(skeleton.eval(), pixels.to(parameter.device, parameter.dtype))
    except Exception as error:  # the processor may belong to another model, so any error is possible
        raise InputError(f"model.name: {name!r} cannot read prepared images: {first_line(error)}") from None
    pooled, states = getattr(output, "pooler_output", None), getattr(output, "last_hidden_state", None)
    if isinstance(pooled, Tensor) and pooled.dim() == 2 and len(pooled) == len(pixels):
        return POOLER, pooled.shape[1]
    if isinstance(states, Tensor) and len(states) == len(pixels):
        if states.dim() == 4:
            return MEAN, states.shape[1]
        if states.dim() == 3:
            return (CLASS_TOKEN if _has_class_token(skeleton) else MEAN), states.shape[2]
    raise InputError(
        f"model.name: {name!r} is of type {skeleton.config.model_type!r}, which gives no vector for each image: "
        "expected an image classifier or an image encoder, such as a ViT, a DINOv2 or a ResNet"
    )


def _output(encoder: Any, pixel_values: Tensor) -> Any:
    more: dict[str, Tensor] = {}
    if "noise" in _arguments(type(encoder)):  # the encoder sorts patches by this noise: keep their order
        side = encoder.config.patch_size
        count = (pixel_values.shape[2] // side) * (pixel_values.shape[3] // side)
        more["noise"] = torch.arange(count, device=pixel_values.device, dtype=torch.float32).expand(
            len(pixel_values), count
        )
    return encoder(pixel_values=pixel_values, **more)


def _pool(output: Any, pooling: str) -> Tensor:
    if pooling == POOLER:
        return output.pooler_output  # type: ignore[no-any-return]
    states: Tensor = output.last_hidden_state
    if pooling == CLASS_TOKEN:
        return states[:, 0]
    return states.mean((2, 3)) if states.dim() == 4 else states.mean(1)


def _has_class_token(encoder: nn.Module) -> bool:
    """Whether the embeddings put a class token before the patches."""
    names = {name.rpartition(".")[2] for name, _ in encoder.named_parameters() if "embedding" in name}
    return bool(names & {"cls_token", "class_embedding"})


def _arguments(encoder: Any) -> frozenset[str]:
    return frozenset(inspect.signature(encoder.forward).parameters)
