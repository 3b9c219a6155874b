"""A module that a user's function makes, in the place of a model from files; the rows come from files as usual.

``model.name = "package.module:function"`` names the function. It takes the number of classes, and returns a module that
maps images (n, 3, H, W) to logits. The task checks the form of the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch
from fedfm.data.user_functions import function
from fedfm.errors import InputError, first_line, quote_names
from fedfm.models import configuration, preprocessing
from fedfm.models.hub_tools import Loaded
from fedfm.models.locate import DTYPES
from fedfm.models.model import Model
from fedfm.models.model_task import ModelTask
from fedfm.models.precision import reduced_precision
from fedfm.models.preprocessors import Tools
from fedfm.models.spec import ModelSpec
from fedfm.models.user.function_calls import call
from fedfm.models.user.module_checks import check_module

_KEYS = ("model", "image_size", "processor")
_LOGITS = ("logits", "out")  # keys of a dict of outputs: of transformers, and of torchvision
_OF_FILES = ("weights", "options", "attention", "quantization")  # keys of [model] for models from files
_SIDE = 224  # the sides of images if nothing states them


class FunctionModel(Model):
    """A :class:`Model` whose module takes the images as its only argument."""

    def outputs(self, batch: Batch) -> Tensor:
        images = batch["pixel_values"].to(self.device)
        with reduced_precision(self.spec.dtype, self.device):
            found = logits_of(self.module(images), self.spec.name)
        self.task.check_outputs(self.spec.name, found.shape, images.shape, len(self.classes))
        return found


def load(spec: ModelSpec, classes: tuple[str, ...], task: ModelTask, seed: int) -> Loaded:
    """Call the function, and try its module on images of zeros.

    Raises:
        InputError: the function was not admitted or fails; or the module does not fit the images or the task.
    """
    name, plain = spec.name, ModelSpec()
    if wrong := next((key for key in _OF_FILES if getattr(spec, key) != getattr(plain, key)), ""):
        raise InputError(f"model.{wrong}: {name} makes the module with its weights; drop it", key=f"model.{wrong}")
    made = call(partial(_make, function(name, "model.name"), name, len(classes)), name, seed)
    module, processor, notices = _read(made, name)
    try:
        check_module(module)
    except InputError as error:
        raise InputError(f"model.name: {name}: {error}", key="model.name") from None
    frozen = tuple(p for p in module.parameters() if not p.requires_grad)
    module = module.to(DTYPES[spec.dtype]).eval()
    config: Any = getattr(module, "config", None)
    if hasattr(config, "save_pretrained"):
        configuration.name_classes(config, classes, None)
    tools = Tools(image=preprocessing.processor_call(processor), processor=processor)
    task.check_tools(tools, name)
    head = _try(module, name, tools, len(classes), task)
    about = {"model_type": "function", "module": type(module).__qualname__}
    return Loaded(module, "function", about, [], tools, notices=notices, head=head, frozen=frozen)


def no_head(name: str) -> InputError:
    """The error for adaptation ``head`` if the trial has found none."""
    return InputError(
        f'model.adaptation.name = "head": the last layer of {name} that runs is not a convolution with one output per '
        "class, so the head is unknown: use full or lora",
        key="model.adaptation.name",
    )


def logits_of(found: Any, name: str) -> Tensor:
    """The logits in a module's output: a tensor, a dict with them, or an object with the attribute ``logits``.

    Raises:
        InputError: the output has another form.
    """
    for key in _LOGITS:
        if isinstance(found, Mapping) and key in found:
            found = found[key]
    found = getattr(found, "logits", found)
    if isinstance(found, Tensor):
        return found
    has = f" with {quote_names(map(str, found))}" if isinstance(found, Mapping) else ""
    raise InputError(
        f"model.name: the module of {name} returns a {type(found).__name__}{has}: expected a tensor of logits, or a "
        f"dict or an output of transformers with {quote_names(_LOGITS)}",
        key="model.name",
    )


def _make(build: Callable[..., Any], name: str, classes: int) -> Any:
    try:
        inspect.signature(build).bind(classes)
    except TypeError:
        raise InputError(
            f"model.name: {name} does not take one argument: expected a function of the number of classes, which "
            "returns a torch.nn.Module",
            key="model.name",
        ) from None
    except ValueError:  # a function of C without a signature
        pass
    return build(classes)


def _read(made: Any, name: str) -> tuple[nn.Module, Any, tuple[str, ...]]:
    """The module, its image processor, and a notice if the size of the images is a guess."""
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    where = f"model.name: {name} returns"
    table = dict(made) if isinstance(made, Mapping) else {"model": made}
    module, size, processor = map(table.get, _KEYS)
    if unknown := sorted(map(str, table.keys() - set(_KEYS))):
        raise InputError(f"{where} the key {unknown[0]!r}; expected {quote_names(_KEYS)}", key="model.name")
    if not isinstance(module, nn.Module):
        raise InputError(f"{where} a {type(module).__name__}; expected a torch.nn.Module", key="model.name")
    if processor is not None and size is not None:
        raise InputError(f"{where} processor and image_size: the processor has a size; drop one", key="model.name")
    if processor is not None:
        if not callable(processor) or not hasattr(processor, "to_dict"):
            kind = type(processor).__name__
            raise InputError(f"{where} a {kind} as processor; expected one of transformers", key="model.name")
        preprocessing.check_pixels_alone(processor, name)
        return module, processor, preprocessing.check_scale(processor, name)
    guess = f"{where} no image_size: images are resized to {_SIDE} x {_SIDE}"
    match _SIDE if size is None else size:
        case int(height), int(width):
            pass
        case int(height):
            width = height
        case _:
            height = width = 0
    if min(height, width) < 1:
        raise InputError(f"{where} image_size = {size!r:.40}; expected a number, or (height, width)", key="model.name")
    made_here = ViTImageProcessorPil(size={"height": height, "width": width})
    return module, made_here, (guess,) if size is None else ()


def _try(module: nn.Module, name: str, tools: Tools, classes: int, task: ModelTask) -> str:
    """Compute a batch of two images of zeros, and one of one image.

    Returns:
        The path of the last convolution if it has one output per class and is the last layer to run; else "".

    Raises:
        InputError: the module fails, or its output has the wrong form.
    """
    from PIL import Image

    assert tools.image is not None  # noqa: S101 - made by :func:`load`
    kind = next((p.dtype for p in module.parameters()), torch.float32)
    images = torch.zeros_like(tools.image([Image.new("RGB", (16, 16))] * 2), dtype=kind)
    called: list[tuple[str, nn.Module]] = []

    def record(path: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda part, given, found: called.append((path, part))

    leaves = [(p, m) for p, m in module.named_modules() if any(True for _ in m.parameters(recurse=False))]
    hooks = [part.register_forward_hook(record(path)) for path, part in leaves]
    try:
        for some in (images, images[:1]):
            found = logits_of(_outputs(module, some, name), name)
            task.check_outputs(name, found.shape, some.shape, classes)
    finally:
        for hook in hooks:
            hook.remove()
    path, last = called[-1] if called else ("", module)
    return path if isinstance(last, nn.Conv2d) and last.out_channels == classes else ""


def _outputs(module: nn.Module, images: Tensor, name: str) -> Any:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return module(images)
    except Exception as error:  # the user's code may raise any error
        raise InputError(
            f"model.name: the module of {name} fails on images ({', '.join(map(str, images.shape))}): "
            f"{type(error).__name__}: {first_line(error, 200)}",
            key="model.name",
        ) from None
