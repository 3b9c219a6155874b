"""Folders and hub ids in Hugging Face's format, read with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfm import seeds
from fedfm.errors import InputError
from fedfm.models import inputs
from fedfm.models.model import Tools
from fedfm.models.quiet import quiet
from fedfm.models.spec import ModelSpec

_Parts = tuple[nn.Module, str, dict[str, Any], list[str], Tools]  # the fields of load.Loaded
PROMPT = "a photo of a {}."  # Learning Transferable Visual Models (CLIP), Radford et al., section 3.1.4


def pretrained(path: Path | str, spec: ModelSpec, classes: tuple[str, ...], kind: str, task: str, seed: int) -> _Parts:
    """The model for the task, with a new head for ``classes`` unless it is a language model."""
    import transformers

    from fedfm.models.load import DTYPES

    with quiet():
        config = _config(path, spec.name)
        labels: dict[str, Any] = {}
        if task == "classification":
            labels = {"id2label": dict(enumerate(classes)), "label2id": {c: i for i, c in enumerate(classes)}}
            auto = "AutoModelForImageClassification" if kind == "image" else "AutoModelForSequenceClassification"
        else:
            auto = "AutoModelForCausalLM"
        for key, value in labels.items():
            setattr(config, key, value)
        tools = _tools(path, spec, config, kind)
        if kind != "image" and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = tools.tokenizer.pad_token_id
        module, missing = _weights(getattr(transformers, auto), path, spec, config, seed, DTYPES[spec.dtype])
    new = _new_modules(module, config.model_type, missing) if task == "classification" else []
    return module, config.model_type, config.to_diff_dict(), new, tools


def zero_shot(path: Path | str, spec: ModelSpec, classes: tuple[str, ...], seed: int) -> _Parts:
    """A CLIP model whose text encoder has turned the class names into a linear classifier."""
    import transformers

    from fedfm.models.clip import ZeroShot, text_embeddings
    from fedfm.models.load import DTYPES

    with quiet():
        config = _config(path, spec.name)
        if config.model_type != "clip":
            raise InputError(
                f"model.name: zero_shot needs a CLIP model, {spec.name!r} is of type {config.model_type!r}"
            )
        tokenizer = _tools(path, spec, config.text_config, "text").tokenizer
        clip, _ = _weights(transformers.CLIPModel, path, spec, config, seed, DTYPES[spec.dtype])
        module = ZeroShot(clip, text_embeddings(clip, tokenizer, [PROMPT.format(c.replace("_", " ")) for c in classes]))
        processor = _image_processor(path, config)
    tools = Tools(image=inputs.processor_call(processor), processor=processor)
    return module, "clip", config.to_diff_dict() | {"classes": list(classes)}, [], tools


def _config(path: Path | str, name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise _refusal(path, name, error) from None


def labels(path: Path | str, name: str) -> tuple[str, ...]:
    """The class names that the model was saved with."""
    with quiet():
        names = _config(path, name).id2label
    return tuple(str(names[i]) for i in sorted(names))


def _first(error: Exception) -> str:
    """The first line of what a library says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _refusal(path: Path | str, name: str, error: Exception) -> InputError:
    first = _first(error)
    if isinstance(path, Path):
        return InputError(f"model.name: {path} cannot be read as a model: {first}")
    return InputError(
        f"model.name: {name!r} is not built in (nano-vit), no folder here, and no hub id that could be read: {first}"
    )


def _weights(
    auto: Any, path: Path | str, spec: ModelSpec, config: Any, seed: int, dtype: torch.dtype
) -> tuple[nn.Module, set[str]]:
    """The module and the names of the weights that the checkpoint does not have."""
    if spec.weights == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(seed, "weights"))
            try:
                module: nn.Module = auto.from_config(config).to(dtype)
            except ValueError as error:
                raise _refusal(path, spec.name, error) from None
        return module, set()
    from safetensors import SafetensorError

    if isinstance(path, Path) and not any(path.glob("*.safetensors")):
        found = next((f.name for p in ("*.bin", "*.pt", "*.pth", "*.ckpt") for f in sorted(path.glob(p))), "no weights")
        raise InputError(f"model.name: {path} has {found}, expected model.safetensors (pickled weights are not read)")
    try:
        # What the checkpoint lacks is drawn inside: it must not depend on the global state, nor move it.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(seed, "adaptation"))
            module, info = auto.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _refusal(path, spec.name, error) from None
    mismatched = {entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"]}
    return module, set(info["missing_keys"]) | mismatched


def _new_modules(module: nn.Module, model_type: str, missing: set[str]) -> list[str]:
    """Paths of the modules made for this task: the head as a whole, and what stands before it and was not in the
    checkpoint. They do not nest.
    """
    from fedfm.models import families

    head = families.find(module, model_type).head
    if not head:
        raise InputError(f"model.name: no classification head found in a model of type {model_type!r}")
    paths = {head.partition(".")[0]}
    known = {name for name, _ in module.named_parameters()}
    for name in missing & known:
        paths.add(name.rpartition(".")[0])
    top = sorted(p for p in paths if not any(p != q and p.startswith(f"{q}.") for q in paths))
    return [p for p in top if p]


def _tools(path: Path | str, spec: ModelSpec, config: Any, kind: str) -> Tools:
    if kind == "image":
        processor = _image_processor(path, config)
        return Tools(image=inputs.processor_call(processor), processor=processor)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model.name: {path} has no tokenizer for data of kind {kind}: {_first(error)}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    # RoBERTa's positions start behind the padding index.
    offset = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
    length = min(spec.max_length, positions - offset) if positions else spec.max_length
    return Tools(tokenizer=tokenizer, max_length=length)


def _image_processor(path: Path | str, config: Any) -> Any:
    """The model's own processor, on Pillow: the same pixels whether or not torchvision is installed."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError):
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224) or 224
        side = {"height": size, "width": size} if isinstance(size, int) else {"height": size[0], "width": size[1]}
        return ViTImageProcessorPil(size=side)
