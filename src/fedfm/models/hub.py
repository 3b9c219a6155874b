"""Loads folders and hub ids in Hugging Face's format with transformers."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedfm.core.fields import check
from fedfm.errors import InputError
from fedfm.models import (
    configuration,
    derived_modules,
    devices,
    encoder_decoder,
    families,
    lengths,
    preprocessing,
    tokenizer_files,
    weights,
)
from fedfm.models.kinds import is_pooled_encoder
from fedfm.models.locate import DTYPES, locate, stored_file
from fedfm.models.preprocessors import Tools
from fedfm.models.quantised_maps import of_folder
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec

if TYPE_CHECKING:
    from fedfm.models.model_task import ModelTask

_TEXT_HEADS = ("SequenceClassification", "CausalLM", "MaskedLM")
_HEADS = ("ImageClassification", "SequenceClassification", "CausalLM")
_TWO_HEADS = ("deit",)  # saved with a classifier and a distillation head, whose mean is the output


@dataclass
class Loaded:
    """A module before its adaptation.

    Attributes:
        module: on the CPU.
        model_type: the key of :data:`fedfm.models.families.FAMILIES`.
        config: the architecture as JSON; for transformers only differences from the defaults, so that a new field of
            another version changes nothing.
        new: paths of the modules that were created for this task.
        tools: preprocessing of its rows.
        missing: names of the weights that the checkpoint lacks, or has in another shape, since they are new here.
        stored: the weights as the checkpoint has them, where the module has others: a quantised base; else None.
        placed: whether the module is on its devices already.
        hollow: whether its weights are zeros that take no memory.
        notices: what was guessed.
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


def load_pretrained(
    path: Path | str,
    spec: ModelSpec,
    classes: tuple[str, ...],
    kind: str,
    task: ModelTask,
    seed: int,
    hollow: bool = False,
) -> Loaded:
    """The model for the task, with a new head for ``classes`` unless it is a language model.

    Args:
        hollow: as of :func:`fedfm.models.load.load_model`.
    """
    import transformers

    with quiet():
        config = configuration.read(path, spec)
        if config.model_type in _TWO_HEADS:
            config.architectures = []  # transformers then takes its first class, which has one head
        _check_kind(config, spec.name, kind, task)
        encoder_decoder.prepare(config, path, spec.name, task)
        if kind == "image" and task.classifies_by_head and _is_encoder(config):
            return _of_encoder(path, spec, config, classes, seed)
        if task.new_head:
            configuration.name_classes(config, classes)
        tools = _tools(path, spec, config, kind, answers=task.answers)
        if kind != "image" and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tools.tokenizer.pad_token_id
        auto_class = getattr(transformers, f"AutoModelFor{task.auto_class(kind)}")
        about = config.to_diff_dict()
        shape = weights.hollow(auto_class, path, spec, config, head=task.new_head) if hollow else None
        read, stored = shape or weights.module_of(auto_class, path, spec, config, seed, head=task.new_head)
    module = read.module
    derived_modules.install(module)
    if tools.tokenizer is not None:
        tools = lengths.fit(tools, spec, module, config)
    new = weights.new_modules(module, config.model_type, read.new) if task.new_head else []
    placed = stored is not None or bool(devices.placement(spec.device))
    return Loaded(
        module,
        config.model_type,
        about,
        new,
        tools,
        frozenset(read.new),
        stored,
        placed,
        hollow=shape is not None,
        notices=tuple(read.notices),
    )


def _is_encoder(config: Any) -> bool:
    """Whether transformers has an encoder of pictures alone for this configuration, and no classifier."""
    import transformers

    if type(config) in transformers.AutoModelForImageClassification._model_mapping:
        return False
    from fedfm.models.architectures.pooled_encoder import has_encoder

    return has_encoder(config)


def _of_encoder(path: Path | str, spec: ModelSpec, config: Any, classes: tuple[str, ...], seed: int) -> Loaded:
    """A classifier of an encoder for which transformers has none: with a new linear head on what it pools."""
    import transformers
    from PIL import Image

    from fedfm.models import quantised
    from fedfm.models.architectures import pooled_encoder
    from fedfm.models.architectures.pooled_encoder import PooledEncoder

    if quantised.describe(spec, config):
        raise InputError(
            f"model.quantization: transformers has no classifier of type {config.model_type!r}, and encoders of "
            "pictures are read whole; drop it",
            key="model.quantization",
        )
    about = config.to_diff_dict()
    pooled_encoder.sees_all(config)
    processor, guess = _image_processor(path, spec, config)
    image = preprocessing.processor_call(processor)
    with torch.device("meta"):
        skeleton = transformers.AutoModel.from_config(config)
    blank = Image.new("RGB", (8, 8))
    pooling, width = pooled_encoder.pooling_of(skeleton, image([blank, blank]), spec.name)
    read = weights.load(transformers.AutoModel, path, spec, config, seed, DTYPES[spec.dtype], head=False)
    module, tools = PooledEncoder(read.module, pooling, width, len(classes)), Tools(image, processor, notices=guess)
    return Loaded(module, config.model_type, about, ["classifier"], tools, notices=tuple(read.notices))


def zero_shot(path: Path | str, spec: ModelSpec, classes: tuple[str, ...], seed: int) -> Loaded:
    """A model of two encoders that compares pictures with the class names.

    With adaptation ``head`` the text embeddings of the names become a linear head, and the text encoder is dropped.
    """
    import transformers

    from fedfm.models import quantised
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
                "model.quantization: models of two encoders are read whole; drop it, or take a classifier with "
                'model.task = "classification"',
                key="model.quantization",
            )
        tools = _tools(path, spec, config.text_config, "text", answers=False)
        read = weights.load(transformers.AutoModel, path, spec, config, seed, DTYPES[spec.dtype], head=False)
        tools = lengths.fit(tools, spec, read.module, config.text_config)
        siglip = config.model_type == "siglip"
        if siglip and tools.positions:  # all its texts have this length, also in an export
            tools = dataclasses.replace(tools, max_length=tools.positions)
        prompts = tokenise(
            tools.tokenizer,
            classes,
            spec.templates,
            length=tools.max_length,
            whole=siglip,  # SigLIP was trained so, and reads the last place
            context=adapt.tokens if adapt.name == "prompt" else 0,
        )
        dual = DualEncoder(read.module, prompts)
        processor, guess = _image_processor(path, spec, config)
    if not families.find(dual, config.model_type).text_blocks:
        raise InputError(
            f"model.name: no layers are known of the text encoder of {spec.name!r}, of type "
            f"{config.text_config.model_type!r}; expected a BERT or RoBERTa",
            key="model.name",
        )
    tools = dataclasses.replace(
        tools, image=preprocessing.processor_call(processor), processor=processor, notices=guess
    )
    about, new = config.to_diff_dict() | {"classes": list(classes)}, ["context"] if prompts.context else []
    if adapt.name == "head":
        with torch.no_grad():
            module: nn.Module = ZeroShotClassifier(dual.clip, dual.scale * dual.eval().texts().float())
        tools = dataclasses.replace(tools, tokenizer=None)
        return Loaded(module, config.model_type, about, [], tools, notices=tuple(read.notices))
    return Loaded(dual, config.model_type, about, new, tools, notices=tuple(read.notices))


def architecture(spec: ModelSpec, tokenizer: Any) -> Any:
    """The configuration of the model in ``spec`` with the vocabulary of another tokenizer.

    Raises:
        InputError: it cannot be read, or has no vocabulary.
    """
    with quiet():
        config = configuration.read(locate(spec.name), spec)
    if getattr(config, "vocab_size", None) is None:
        raise InputError(
            f"pretrain.vocabulary_size: {spec.name!r} is of type {config.model_type!r}, without a vocabulary",
            key="pretrain.vocabulary_size",
        )
    config.vocab_size = len(tokenizer)
    config.pad_token_id = tokenizer.pad_token_id
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    return config


def as_saved(path: Path | str, name: str, like: Any) -> tuple[nn.Module, str, set[str]]:
    """As :func:`fedfm.models.load.as_saved`, without tokenizer and image processor."""
    spec = ModelSpec(name)
    with quiet():
        config = configuration.read(path, spec)
        if of_folder(config) is not None:
            raise InputError(f"{name}: its weights are quantised, and are compared with a model's; name the originals")
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
    """The class for a model of this configuration with the kind of head that ``like`` has."""
    import transformers

    for auto in (getattr(transformers, f"AutoModelFor{name}") for name in _HEADS):
        classes = auto._model_mapping.get(type(like.config), ())
        if isinstance(like, classes) and type(config) in auto._model_mapping:
            return auto
    own = (c for c in type(like).__mro__ if c.__module__.partition(".")[0] == "transformers")
    return next(own, transformers.AutoModel)


def _check_kind(config: Any, name: str, kind: str, task: ModelTask) -> None:
    """Refuse a picture model for text, a text model for pictures, and a masked model for running text."""
    import transformers

    reads = {
        "image": type(config) in transformers.AutoModelForImageClassification._model_mapping,
        "text": any(type(config) in getattr(transformers, f"AutoModelFor{h}")._model_mapping for h in _TEXT_HEADS),
    }
    needs, other = ("image", "text") if kind == "image" else ("text", "image")
    if reads[other] and not reads[needs]:
        words = {"image": "pictures", "text": "text"}
        raise InputError(
            f"model.name: {name!r} is of type {config.model_type!r}, which reads {words[other]}: it does not fit data "
            f"of kind {kind}",
            key="model.name",
        )
    masked = type(config) in transformers.AutoModelForMaskedLM._model_mapping
    if task.is_language_model and masked and getattr(config, "is_decoder", None) is False:
        raise InputError(
            f"model.name: {name!r} is of type {config.model_type!r}, which sees the words that it predicts: "
            f'model.task = "{task}" needs a causal model, such as a llama or a gpt2',
            key="model.name",
        )


def _tools(path: Path | str, spec: ModelSpec, config: Any, kind: str, *, answers: bool) -> Tools:
    if kind == "image":
        processor, guess = _image_processor(path, spec, config)
        return Tools(image=preprocessing.processor_call(processor), processor=processor, notices=guess)
    # From the configuration alone transformers would create a tokenizer without words.
    if isinstance(path, Path) and not any(f for p in ("tokenizer*", "vocab*", "*.model") for f in path.glob(p)):
        raise InputError(
            f"model.name: {path} has no tokenizer for data of kind {kind}: put its files there", key="model.name"
        )
    try:
        tokenizer, by, guess = tokenizer_files.read(path, spec.name)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"model.name: {path} has no tokenizer for data of kind {kind}: {weights.first_of(error)}", key="model.name"
        ) from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    template: str | None = None
    notices = guess
    if answers:
        from fedfm.models.language import chat_templates

        with quiet():
            template = chat_templates.text_of(spec.template, tokenizer)
            if template is not None and spec.chat_template_kwargs:
                raise InputError(
                    "model.chat_template_kwargs: the template is a text without variables; drop one",
                    key="model.chat_template_kwargs",
                )
            notices = (*guess, *chat_templates.fit(tokenizer, template, spec.chat_template_kwargs or {}))
    return Tools(  # max_length: lengths.fit
        tokenizer=tokenizer, tokenizer_class=by, max_length=spec.max_length, template=template, notices=notices
    )


def _image_processor(path: Path | str, spec: ModelSpec, config: Any) -> tuple[Any, tuple[str, ...]]:
    """The model's own processor, on Pillow: the same pixels whether or not torchvision is installed; and a notice if
    it is guessed for weights that were trained with one.

    Raises:
        InputError: its file cannot be read.
    """
    from transformers import AutoImageProcessor
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    why = f"{spec.name} has no preprocessor_config.json"
    try:
        found = AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
    except ImportError as error:
        reason = weights.first_of(error).partition(". ")[0]
        why = f"the image processor of {spec.name} does not run here ({reason})"
        processor = ViTImageProcessorPil.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        if any(stored_file(path, f"{kind}_config.json") is not None for kind in ("preprocessor", "processor")):
            raise InputError(
                f"model.name: the image processor of {spec.name!r} cannot be read: "
                f"{textwrap.shorten(weights.first_of(error), 200, placeholder=' ...')}",
                key="model.name",
            ) from None
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224) or 224
        side = {"height": size, "width": size} if isinstance(size, int) else {"height": size[0], "width": size[1]}
        processor = ViTImageProcessorPil(size=side)
    else:
        preprocessing.check_pixels_alone(found, spec.name)
        return found, ()
    if spec.weights == "random":
        return processor, ()
    shape = " x ".join(str(n) for n in dict(processor.size).values() if n)
    return processor, (
        f"model.name: {why}: pictures are resized to {shape} and normalised with mean {list(processor.image_mean)} and "
        f"standard deviation {list(processor.image_std)}, which may be others than the model was trained with",
    )
