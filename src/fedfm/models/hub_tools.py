"""The result of loading a model from the hub, and the tokenizer or image processor that prepares its rows."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fedfm.errors import InputError
from fedfm.models import preprocessing, refusals
from fedfm.models.locate import BUILT_IN, stored_file
from fedfm.models.preprocessors import Tools
from fedfm.models.quiet import quiet
from fedfm.models.spec import ModelSpec

if TYPE_CHECKING:
    from fedfm.models.model_task import ModelTask


@dataclass
class Loaded:
    """A module before its adaptation.

    Attributes:
        module: the module, on the CPU.
        model_type: the key of :data:`fedfm.models.families.FAMILIES`.
        config: the architecture as JSON. For transformers models it has only values other than the defaults, so that a
            new field in another version leaves this JSON unchanged.
        new: paths of the modules that were created for this task.
        tools: the preprocessors of the model's rows.
        missing: names of the new weights, which the checkpoint lacks or has in another shape.
        stored: the checkpoint's own weights if the base is quantised, because the module has rounded ones; else None.
        placed: whether the module is on its devices already.
        hollow: whether the module's weights are placeholders (zeros) that take no memory.
        notices: lines for the user about guesses.
        outputs: the checkpoint's names for the outputs of its head; () if it names none.
        head: path of the last map of a module that a user's function made; "" if there is none. None for other models,
            whose head :mod:`fedfm.models.families` finds.
        frozen: parameters that the function froze.
    """

    module: nn.Module
    model_type: str
    config: dict[str, Any]
    new: list[str]
    tools: Tools
    missing: frozenset[str] = frozenset()
    stored: Mapping[str, Tensor] | None = None
    placed: bool = False
    hollow: bool = False
    notices: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    head: str | None = None
    frozen: tuple[nn.Parameter, ...] = ()


def tools_of(path: Path | str, spec: ModelSpec, config: Any, kind: str, task: ModelTask) -> Tools:
    """The tokenizer or image processor that prepares rows of this kind for the task."""
    if kind == "image":
        processor, guess = image_processor(path, spec, config)
        return Tools(image=preprocessing.processor_call(processor), processor=processor, notices=guess)
    # From the configuration alone, transformers would create a tokenizer without words.
    if isinstance(path, Path) and not any(f for p in ("tokenizer*", "vocab*", "*.model") for f in path.glob(p)):
        raise InputError(
            f"model.name: {path} has no tokenizer for data of kind {kind}: put a tokenizer there", key="model.name"
        )
    from fedfm.models import tokenizer_files, unknown_keys

    try:
        tokenizer, by, guess = tokenizer_files.read(path, spec.name)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"model.name: {path} has no tokenizer for data of kind {kind}: {refusals.first_of(error)}", key="model.name"
        ) from None
    misspelt = unknown_keys.of_tokenizer(path, tokenizer)
    guess = (
        *guess,
        *tokenizer_files.contradictions(path, tokenizer, spec.name),
        *tokenizer_files.cls_notice(tokenizer, spec.name),
        *(tokenizer_files.templates(path, tokenizer, spec.name) if task.answers else ()),
        *(f"model.name: {path} {text}" for text in misspelt),
    )
    tokenizer_files.choose_padding(tokenizer, None if task.is_language_model else config)
    processor, more = task.processor(path, spec, config, tokenizer)
    with quiet():
        template, notices = task.fit_tokenizer(tokenizer)
    if hasattr(processor, "chat_template"):
        processor.chat_template = tokenizer.chat_template  # an export writes both
    return Tools(  # positions.fit later limits max_length to the model's positions
        processor=processor,
        tokenizer=tokenizer,
        tokenizer_class=by,
        max_length=spec.max_length,
        template=template,
        notices=(*guess, *more, *notices),
    )


def image_processor(path: Path | str, spec: ModelSpec, config: Any) -> tuple[Any, tuple[str, ...]]:
    """The model's image processor, and a notice if the processor is guessed for pretrained weights.

    The processor uses Pillow, so that pixels do not depend on torchvision.

    Raises:
        InputError: the processor's file cannot be read.
    """
    from transformers import AutoImageProcessor
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    why = f"{spec.name} has no preprocessor_config.json"
    try:
        found = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
    except ImportError as error:
        reason = refusals.first_of(error).partition(". ")[0]
        why = f"the image processor of {spec.name} does not run here ({reason})"
        processor = ViTImageProcessorPil.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        if any(stored_file(path, f"{kind}_config.json") is not None for kind in ("preprocessor", "processor")):
            raise InputError(
                f"model.name: the image processor of {spec.name!r} cannot be read: "
                f"{textwrap.shorten(refusals.first_of(error).rpartition(' imported. ')[2], 200, placeholder=' ...')}",
                key="model.name",
            ) from None
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224) or 224
        side = {"height": size, "width": size} if isinstance(size, int) else {"height": size[0], "width": size[1]}
        processor = ViTImageProcessorPil(size=side)
    else:
        preprocessing.check_pixels_alone(found, spec.name)
        notices = preprocessing.check_scale(found, spec.name)
        if spec.name in BUILT_IN:
            return found, notices
        from fedfm.models import processor_files, unknown_keys

        faults = [*processor_files.notices(path, found), *unknown_keys.of_image_processor(path, found)]
        return found, (*notices, *(f"model.name: {path} {text}" for text in faults))
    if spec.weights == "random":
        return processor, ()
    shape = " x ".join(str(n) for n in dict(processor.size).values() if n)
    return processor, (
        f"model.name: {why}: images are resized to {shape} and normalised with mean {list(processor.image_mean)} and "
        f"standard deviation {list(processor.image_std)}, which may differ from the model's training",
    )
