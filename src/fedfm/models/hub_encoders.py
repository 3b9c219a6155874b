"""Loads encoders for which transformers has no classifier: image encoders, and pairs of an image and a text encoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedfm.core.fields import check
from fedfm.errors import InputError
from fedfm.models import (
    configuration,
    families,
    positions,
    preprocessing,
    unread_parts,
    weights,
)
from fedfm.models.hub_tools import Loaded, image_processor, tools_of
from fedfm.models.locate import DTYPES
from fedfm.models.preprocessors import Tools
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec

if TYPE_CHECKING:
    from fedfm.models.model_task import ModelTask


def load_pooled_encoder(path: Path | str, spec: ModelSpec, config: Any, classes: tuple[str, ...], seed: int) -> Loaded:
    """A classifier for an encoder without a classification class: a new linear head reads the pooled output."""
    import transformers
    from PIL import Image

    from fedfm.models import quantised
    from fedfm.models.architectures import pooled_encoder
    from fedfm.models.architectures.pooled_encoder import PooledEncoder

    if quantised.describe(spec, config):
        raise InputError(
            f"model.quantization: transformers has no classifier of type {config.model_type!r}, and image "
            "encoders can only be read unquantised; drop it",
            key="model.quantization",
        )
    about = config.to_diff_dict()
    pooled_encoder.sees_all(config)
    processor, guess = image_processor(path, spec, config)
    image = preprocessing.processor_call(processor)
    with torch.device("meta"):
        skeleton = transformers.AutoModel.from_config(config)
    blank = Image.new("RGB", (8, 8))
    pooling, width = pooled_encoder.pooling_of(skeleton, image([blank, blank]), spec.name)
    read = weights.load(transformers.AutoModel, path, spec, config, seed, DTYPES[spec.dtype], head=False)
    read.notices += unread_parts.notices(path, config, spec)
    module, tools = PooledEncoder(read.module, pooling, width, len(classes)), Tools(image, processor, notices=guess)
    return Loaded(module, config.model_type, about, ["classifier"], tools, notices=tuple(read.notices))


def zero_shot(path: Path | str, spec: ModelSpec, classes: tuple[str, ...], task: ModelTask, seed: int) -> Loaded:
    """A model of two encoders that compares images with the class names.

    With adaptation ``head``, the text embeddings of the names become a linear head, and the text encoder is dropped.
    """
    import transformers

    from fedfm.models import prompt_names, quantised
    from fedfm.models.architectures.clip_zero_shot import ZeroShotClassifier
    from fedfm.models.architectures.dual_encoder import MODEL_TYPES, DualEncoder, tokenise

    check(spec, "model")
    adapt = spec.adaptation or AdaptationSpec()
    with quiet():
        config = configuration.read(path, spec)
        if config.model_type not in MODEL_TYPES:
            raise InputError(
                f'model.name: model.task = "zero_shot" needs a model of two encoders, such as a CLIP or a SigLIP; '
                f"{spec.name!r} is of type {config.model_type!r}",
                key="model.name",
            )
        if quantised.describe(spec, config):
            raise InputError(
                "model.quantization: models of two encoders can only be read unquantised; drop it, or take a "
                'classifier with model.task = "classification"',
                key="model.quantization",
            )
        tools = tools_of(path, spec, config.text_config, "text", task)
        read = weights.load(transformers.AutoModel, path, spec, config, seed, DTYPES[spec.dtype], head=False)
        tools = positions.fit(tools, spec, read.module, config.text_config)
        tools.tokenizer.padding_side = "right"  # a text encoder counts positions from the first token
        siglip = config.model_type == "siglip"
        if siglip and tools.positions:  # SigLIP's texts all have this length, also in an export
            tools = dataclasses.replace(tools, max_length=tools.positions)
        prompts = tokenise(
            tools.tokenizer,
            classes,
            task.class_templates,
            length=tools.max_length,
            whole=siglip,  # SigLIP was trained with texts padded to this length, and reads the last position
            context=adapt.tokens if adapt.name == "prompt" else 0,
        )
        dual = DualEncoder(read.module, prompts)
        prompt_names.check_read(dual, prompts, spec.name)
        processor, guess = image_processor(path, spec, config)
    if not families.find(dual, config.model_type).text_blocks:
        raise InputError(
            f"model.name: the layers of the text encoder of {spec.name!r} are unknown; its type is "
            f"{config.text_config.model_type!r}; expected a BERT or RoBERTa",
            key="model.name",
        )
    tools = dataclasses.replace(
        tools,
        image=preprocessing.processor_call(processor),
        processor=processor,
        notices=(*tools.notices, *guess),
    )
    read.notices += unread_parts.notices(path, config, spec)
    if not prompts.context:
        read.notices += prompt_names.notices(classes, task.class_templates)
        read.notices += prompt_names.read_alike(prompts, classes)
    about, new = config.to_diff_dict() | {"classes": list(classes)}, ["context"] if prompts.context else []
    if adapt.name == "head":
        with torch.no_grad():
            module: nn.Module = ZeroShotClassifier(dual.clip, dual.scale * dual.eval().texts().float())
        tools = dataclasses.replace(tools, tokenizer=None)
        return Loaded(module, config.model_type, about, [], tools, notices=tuple(read.notices))
    return Loaded(dual, config.model_type, about, new, tools, notices=tuple(read.notices))
