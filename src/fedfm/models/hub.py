"""Loads folders and hub ids in Hugging Face's format with transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedfm.errors import InputError
from fedfm.models import configuration, derived_modules, devices, weights
from fedfm.models.hub_tools import Loaded, tools_of
from fedfm.models.locate import BUILT_IN, DTYPES, locate
from fedfm.models.quantised_maps import of_folder
from fedfm.models.quiet import quiet
from fedfm.models.spec import ModelSpec

if TYPE_CHECKING:
    from fedfm.models.model_task import ModelTask

_TEXT_HEADS = ("SequenceClassification", "CausalLM", "MaskedLM")
_HEADS = ("ImageClassification", "SequenceClassification", "CausalLM")
_TWO_HEADS = ("deit",)  # saved with a classifier and a distillation head; the output is their mean


def load_pretrained(
    path: Path | str,
    spec: ModelSpec,
    classes: tuple[str, ...],
    kind: str,
    task: ModelTask,
    seed: int,
    hollow: bool,
) -> Loaded:
    """The model for the task, with a new head for ``classes`` unless it is a language model.

    Args:
        hollow: see :func:`fedfm.models.load.load_model`.
    """
    with quiet():
        config = configuration.read(path, spec)
        if config.model_type in _TWO_HEADS:
            config.architectures = []  # transformers then takes its first class, which has one head
        kind = _input_of(config, spec.name, kind, task)
        if getattr(config, "is_encoder_decoder", False):
            from fedfm.models import encoder_decoder

            encoder_decoder.prepare(config, path, spec.name, task)
        if kind == "image" and task.classifies_by_head and _is_encoder(config):
            from fedfm.models.hub_encoders import load_pooled_encoder

            return load_pooled_encoder(path, spec, config, classes, seed)
        outputs = configuration.class_names(config)
        if task.new_head:
            configuration.name_classes(config, classes, task.problem_type)
        task.fit_config(config, spec.name)
        tools = task.complete_tools(tools_of(path, spec, config, kind, task), path, config)
        unpadded = tools.tokenizer is not None and getattr(config, "pad_token_id", None) is None
        if unpadded:
            config.pad_token_id = tools.tokenizer.pad_token_id
        auto_class, guesses = task.model_class(kind, path, config)
        about = config.to_diff_dict()
        configuration.keep_weights(config)
        shape: tuple[weights.Read, Mapping[str, Tensor]] | None = None
        stored: Mapping[str, Tensor] | None = None
        if hollow or spec.quantization is not None or of_folder(config) is not None:
            from fedfm.models import stored_weights

            shape = stored_weights.hollow(auto_class, path, spec, config, head=task.new_head) if hollow else None
            whole = shape or stored_weights.module_of(auto_class, path, spec, config, seed, head=task.new_head)
            read, stored = whole
        else:
            dtype, where = DTYPES[spec.dtype], devices.placement(spec.device)
            read = weights.load(auto_class, path, spec, config, seed, dtype, head=task.new_head, **where)
    module = read.module
    derived_modules.install(module)
    unread: list[str] = []
    if spec.name not in BUILT_IN:
        from fedfm.models import processor_files, unread_parts

        unread = unread_parts.notices(path, config, spec, answers=task.generates)
        if tools.image is not None and spec.weights == "pretrained":
            unread += processor_files.of_other_size(tools.image, module, config, spec.name)
    if tools.tokenizer is not None:
        from fedfm.models import positions

        tools = positions.fit(tools, spec, module, config)
        if unpadded:
            positions.train_every_word(module)
    task.check_tools(tools, spec.name)
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
        notices=(*guesses, *read.notices, *unread),
        outputs=outputs,
    )


def _is_encoder(config: Any) -> bool:
    """Whether transformers has only an image encoder for this configuration, and no classifier."""
    import transformers

    if type(config) in transformers.AutoModelForImageClassification._model_mapping:
        return False
    from fedfm.models.architectures.pooled_encoder import has_encoder

    return has_encoder(config)


def architecture(spec: ModelSpec, tokenizer: Any) -> Any:
    """The configuration of the model in ``spec`` with the vocabulary of another tokenizer.

    Raises:
        InputError: the configuration cannot be read, or has no vocabulary.
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


def _input_of(config: Any, name: str, kind: str, task: ModelTask) -> str:
    """The input that the model reads for rows of this kind; raises an InputError if the model does not read it."""
    import transformers

    reads = {
        "image": type(config) in transformers.AutoModelForImageClassification._model_mapping,
        "text": any(type(config) in getattr(transformers, f"AutoModelFor{h}")._model_mapping for h in _TEXT_HEADS),
    }
    kind = task.input_kind(kind, text=reads["text"])
    needs, other = ("image", "text") if kind == "image" else ("text", "image")
    if reads[other] and not reads[needs]:
        words = {"image": "images", "text": "text"}
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
    return kind
