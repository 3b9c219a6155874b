"""Export of a trained model: PEFT's own files, a Hugging Face folder, or plain safetensors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models import export_base, merged_export, merging, quantised
from fedfm.models.adapter_files import (
    WEIGHTS,
    folder_at,
    holding,
    is_lora,
    save_adapter,
    write_about,
    write_tensors,
)
from fedfm.models.adapters.pair_names import GATE, weighed_by
from fedfm.models.adapters.peft_alone import peft_alone
from fedfm.models.families import unwrap
from fedfm.models.kinds import is_dual_encoder, is_pooled_encoder
from fedfm.models.locate import DTYPES
from fedfm.models.merged_export import MergedWeights
from fedfm.models.model import Model
from fedfm.models.network import Network
from fedfm.models.quiet import quiet

Target = Literal["peft", "hf", "torch"]
_NO_CLASS = "transformers has no class for an image encoder with a linear head on its pooled output"


def save_module(model: Model, out: Path | str) -> None:
    """Write all of the module's tensors as safetensors, and ``fedfm.json``."""
    write_tensors(model.module.state_dict(), folder_at(out) / WEIGHTS)
    write_about(model, Path(out))


def export(
    model: Model, w: Params, to: Target, out: Path | str, head_takes: str | None = None, *, scale: str = "none"
) -> Path:
    """Write the model with weights ``w``, its class names and its preprocessing into the folder ``out``.

    Args:
        model: the model, on any device.
        w: trained tensors of this model.
        to: ``peft`` writes an adapter for ``PeftModel.from_pretrained``. The adapter of a classifier also gets the
            files that ``AutoPeftModel...`` needs (see :mod:`fedfm.models.export_base`). ``hf`` writes the complete
            model with the adapter merged into it, for ``AutoModelFor....from_pretrained(out)``. ``torch`` writes the
            same tensors as safetensors, and ``fedfm.json``.
        out: created if it does not exist.
        head_takes: a transform that the features need before the head; ``fedfm.json`` names it.
        scale: ``data.scale`` of the run: how its feature vectors were scaled; ``fedfm.json`` states it.

    Raises:
        InputError: the format does not support the model.
    """
    if to not in ("peft", "hf", "torch"):
        raise InputError(f"--to: unknown {to!r}, expected peft, hf or torch")
    if to != "peft" and weighed_by(w) == GATE:
        raise InputError(f"--to {to}: two experts and a gate are not a single model: use peft, which writes each")
    task = model.task
    model.task, w = task.for_export(model, w)
    try:
        return _write(model, w, to, out, head_takes, scale)
    finally:
        model.task = task


def _write(model: Model, w: Params, to: Target, out: Path | str, head_takes: str | None, scale: str) -> Path:
    if to == "peft":
        if not is_lora(model):
            other = "torch" if model.added_bias or _of_transformers(model.module) is None else "hf or torch"
            raise InputError(f"--to peft: adaptation {model.adaptation!r} makes no PEFT adapter: use {other}")
        if model.spec.weights == "random":
            raise InputError(
                "--to peft: the adapter needs the run's own random weights, and no file has them: use hf or torch"
            )
        if is_pooled_encoder(unwrap(model.module)):
            raise InputError(f"--to peft: {_NO_CLASS}, so that an adapter could not be loaded: use torch")
        save_adapter(model, w, out)
        export_base.complete(model, Path(out))
    elif to == "hf":
        weights = _in_files(model, w)
        module = _of_transformers(merge(model, w) if weights is None else weights.module)
        if module is None:
            if model.adaptation == "prompt":
                raise InputError("--to hf: a model of transformers has no place for learned context vectors: use torch")
            if model.task.two_encoders:
                other = "peft, whose adapter goes onto the CLIPModel, or torch" if is_lora(model) else "torch"
                raise InputError(f"--to hf: transformers has no class for a zero-shot classifier: use {other}")
            if is_pooled_encoder(unwrap(model.module)):
                raise InputError(f"--to hf: {_NO_CLASS}: use torch")
            raise InputError(f"--to hf: {model.spec.name!r} is not a transformers model: use torch")
        if head_takes is not None:  # the folder would load, but predict something else
            raise InputError(
                f"--to hf: this head needs {head_takes}, which no transformers model computes: use `fedfm predict`, or "
                "torch and compute it yourself"
            )
        _without_added_bias(model, module)
        if settings := model.task.generation_settings(model):
            vars(module.generation_config).update(settings)  # update() drops settings of single families
            module.generation_config._from_model_config = False
        with quiet():
            if weights is not None:
                merged_export.save(weights, folder_at(out))
            elif is_lora(model):
                merging.save(module, folder_at(out))
            else:
                module.save_pretrained(str(folder_at(out)))
    else:
        if (weights := _in_files(model, w)) is not None:
            merged_export.write(weights, list(weights), folder_at(out) / WEIGHTS)
        else:
            write_tensors(merge(model, w).state_dict(), folder_at(out) / WEIGHTS)
        write_about(model, Path(out), head_takes, scale)
        if is_pooled_encoder(classifier := unwrap(model.module)):
            with quiet():
                classifier.config.save_pretrained(str(Path(out) / "encoder"))
    save_tools(model, Path(out))
    model.task.add_files(model, to, Path(out))
    return Path(out)


def _in_files(model: Model, w: Params) -> MergedWeights | None:
    """The weights of a model whose base stays in its files; None for a model in memory."""
    if model.slices is None:
        return None
    with quiet(), peft_alone():
        return merged_export.MergedWeights(model, w)


def merge(model: Model, w: Params) -> Any:
    """A copy of the module with weights ``w``, on the CPU, with LoRA merged.

    For a quantised base the copy has the dequantised weights in ``model.dtype``. The copy computes the same as the
    run's model, and is as large as the model was before quantisation.

    Raises:
        InputError: a layer would compute something else with merged weights, see :func:`merging.merge`.
    """
    with holding(model, w):
        module: Any = copy.deepcopy(model.module)

    module = quantised.rebuild(module, DTYPES[model.spec.dtype]) if quantised.kind_of(module) else module.cpu()
    if is_lora(model):
        with quiet(), peft_alone():
            module = merging.merge(module)
    module._forward_pre_hooks.clear()
    return module


def _without_added_bias(model: Model, module: Any) -> None:
    """Remove a bias of zeros from a head whose class has no bias.

    Raises:
        InputError: the bias is not zero, and transformers would drop it while loading.
    """
    if not model.added_bias:
        return
    head: Any = module.get_submodule(model.parts.head)
    if head.bias.any():
        raise InputError(
            f"--to hf: the run gave the head a bias, and {type(module).__name__} has no place for it: use `fedfm "
            "predict`, or torch, or a method that trains the head without a bias, such as fedavg"
        )
    head.bias = None


def _of_transformers(module: Any) -> Any:
    """The module that ``save_pretrained`` writes for transformers; None if transformers has no class for the model."""
    if is_dual_encoder(module):
        return module.clip if module.context is None else None
    return module if hasattr(module, "save_pretrained") else None


def save_tools(model: Network, folder: Path) -> None:
    """Write the processor and the tokenizer, with the length and the padding of training."""
    tools = [tool for tool in (model.tools.processor, model.tools.tokenizer) if tool is not None]
    if not tools:  # a head on features needs no transformers
        return
    with quiet():
        for tool in tools:
            if tool is model.tools.tokenizer:
                tool = copy.copy(tool)
                tool.model_max_length = model.tools.max_length  # as in training: `truncation=True` cuts there
                if model.task.answers:
                    _pad(tool, "left")  # as in `fedfm predict`: an answer follows its prompt
                elif not model.task.is_language_model:  # a language model keeps padding before its prompts
                    _pad(tool, "right")  # as in training
            tool.save_pretrained(str(folder))


def _pad(tokenizer: Any, side: str) -> None:
    """Set the padding side, also in ``init_kwargs``: only settings from there go into the tokenizer's file."""
    tokenizer.padding_side = side
    tokenizer.init_kwargs = {**tokenizer.init_kwargs, "padding_side": side}
