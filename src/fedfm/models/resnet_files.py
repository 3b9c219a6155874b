"""Loads a CIFAR ResNet from one file of weights."""

from __future__ import annotations

from pathlib import Path

import torch

from fedfm import seeds
from fedfm.errors import InputError
from fedfm.models.hub_tools import Loaded
from fedfm.models.image_settings import plain_call
from fedfm.models.locate import DTYPES
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import ModelSpec


def load_resnet(path: Path, spec: ModelSpec, classes: tuple[str, ...] | None, kind: str, seed: int) -> Loaded:
    """A CIFAR ResNet with a new head for ``classes``; if ``classes`` is None, with the head of the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from fedfm.models.architectures import resnet

    if kind != "image":
        raise InputError(f"model.name: {path} reads images, but the data are of kind {kind}", key="model.name")
    if spec.options:
        raise InputError(
            f"model.options: {path} is one file of weights, which fixes the architecture; drop it", key="model.options"
        )
    try:
        state = load_file(path)
        count = len(state["linear.weight"] if classes is None else classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(seed, "weights"))
            net = resnet.build(state, count, pretrained=spec.weights == "pretrained")
        if classes is None:
            net.load_state_dict(state, strict=False)
    except (KeyError, RuntimeError, SafetensorError, OSError) as error:
        text = " ".join(str(error.args[0] if error.args else error).split())
        raise InputError(f"model.name: {path} is not a CIFAR ResNet: {text}", key="model.name") from None
    net = net.to(DTYPES[spec.dtype])
    config = {"model_type": "cifar_resnet", "blocks": net.config.blocks}
    image = plain_call(resnet.SIZE, resnet.IMAGE_MEAN, resnet.IMAGE_STD)
    guess = (
        f"model.name: {path} does not say how images are prepared: they are resized to {resnet.SIZE} x {resnet.SIZE} "
        f"and normalised with mean {list(resnet.IMAGE_MEAN)} and standard deviation {list(resnet.IMAGE_STD)}, those of "
        "ImageNet"
    )
    tools = Tools(image=image, notices=(guess,) if spec.weights == "pretrained" else ())
    return Loaded(net, "cifar_resnet", config, ["linear"], tools)
