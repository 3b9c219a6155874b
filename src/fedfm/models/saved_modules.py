"""Loads a model with its saved head and labels, to compare it with another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfm.errors import InputError
from fedfm.models import configuration, derived_modules, families, weights
from fedfm.models.finite import Finite
from fedfm.models.kinds import is_pooled_encoder
from fedfm.models.locate import locate
from fedfm.models.quantised_maps import of_folder
from fedfm.models.quiet import quiet
from fedfm.models.resnet_files import load_resnet
from fedfm.models.spec import ModelSpec

_HEADS = ("ImageClassification", "SequenceClassification", "CausalLM")


def as_saved(name: str, like: Any) -> tuple[nn.Module, str, set[str]]:
    """A model with its saved head and labels: the module, its type, and the names of tensors that its weights lack.

    Args:
        name: a built-in model, a folder, a file of a CIFAR ResNet, or a hub id.
        like: the module for comparison; it determines the kind of the head.

    Raises:
        InputError: the model cannot be read, or is of another family.
    """
    path = locate(name)
    if isinstance(path, Path) and path.is_file():
        families.check_alike(name, "cifar_resnet", families.type_of(like))
        loaded = load_resnet(path, ModelSpec(name), None, "image", seed=0)
        return loaded.module, loaded.model_type, set()
    module, model_type, drawn = _of_folder(path, name, like)
    look = Finite(name, {key for key, _ in module.named_parameters()})
    for key, tensor in module.state_dict().items():
        look(key, tensor)
    return module, model_type, drawn


def _of_folder(path: Path | str, name: str, like: Any) -> tuple[nn.Module, str, set[str]]:
    """As :func:`as_saved`, but only for a folder or a hub id; reads no tokenizer and no image processor."""
    spec = ModelSpec(name)
    with quiet():
        config = configuration.read(path, spec)
        if of_folder(config) is not None:
            raise InputError(
                f"{name}: its weights are quantised, and an exact comparison needs the originals; name their folder"
            )
        families.check_alike(name, config.model_type, families.type_of(like))
        read = weights.load(_class_for(like, config), path, spec, config, 0, torch.float32, head=True)
        module, drawn = read.module, read.new
        if is_pooled_encoder(like):
            from fedfm.models.architectures.pooled_encoder import PooledEncoder

            head = like.classifier
            module = PooledEncoder(module, like.pooling, head.in_features, head.out_features)
            drawn = {f"encoder.{name}" for name in drawn} | {"classifier.weight", "classifier.bias"}
    derived_modules.install(module)
    return module, str(config.model_type), drawn


def _class_for(like: Any, config: Any) -> Any:
    """The class for a model of this configuration with a head of the same kind as ``like``."""
    import transformers

    for auto in (getattr(transformers, f"AutoModelFor{name}") for name in _HEADS):
        classes = auto._model_mapping.get(type(like.config), ())
        if isinstance(like, classes) and type(config) in auto._model_mapping:
            return auto
    own = (c for c in type(like).__mro__ if c.__module__.partition(".")[0] == "transformers")
    return next(own, transformers.AutoModel)
