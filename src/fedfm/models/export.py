"""Export of a trained model: PEFT's own files, a Hugging Face folder, or plain safetensors."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from fedfm.core.text import to_json
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.adapters.adaptation import LORA
from fedfm.models.adapters.lora_names import rank_of
from fedfm.models.adapters.pair_names import GATE, GLOBAL, LOCAL, MIX, weighed_by
from fedfm.models.adapters.peft_alone import peft_alone
from fedfm.models.adapters.stacked import from_files, in_files, in_names_of_peft
from fedfm.models.families import unwrap
from fedfm.models.kinds import is_dual_encoder, is_dual_model, is_pooled_encoder
from fedfm.models.locate import DTYPES
from fedfm.models.model import Model
from fedfm.models.quiet import quiet

Target = Literal["peft", "hf", "torch"]
ADAPTER, WEIGHTS, ABOUT = "adapter_model.safetensors", "model.safetensors", "fedfm.json"
_NO_CLASS = "an encoder of pictures with a linear head on what it pools is no class of transformers"
WEIGHING = {MIX: "mix.safetensors", GATE: "gate.safetensors"}  # of two adapters in one folder


def save_adapter(model: Model, w: Params, folder: Path | str, head_takes: str | None = None) -> Path:
    """Write the trained tensors: LoRA of any rank as ``adapter_config.json`` and ``adapter_model.safetensors``, others
    as ``model.safetensors``. ``fedfm.json`` names the model and the classes. Two adapters are written as ``global/``
    and ``local/``, and their weights as ``mix.safetensors`` or ``gate.safetensors``; a pair is also written as one
    adapter (by their mean if rows have own weights). ``head_takes``: the transform of features before the head.

    Raises:
        KeyError, ValueError: ``w`` is not of this model.
    """
    folder = _folder(folder)
    if (part := weighed_by(w)) is not None:
        for name in (GLOBAL, LOCAL):
            save_adapter(model, w.part(name), folder / name)
        _save(w.part(part), folder / WEIGHING[part])
        if part == GATE:
            _about(model, folder)
            return folder
        from fedfm.models.adapters.experts import one_adapter

        w = one_adapter(model, w)
    other = rank_of(w) != rank_of(model.params())
    if _is_lora(model) and other and (rank := rank_of(w)):
        _save_lora(model, w, rank, folder)
    elif _is_lora(model) and (is_dual_model(model) or in_names_of_peft(_config(model), model.module)):
        with holding(model, w):
            _write_lora(model, _lora_state(model), None, folder)
    elif _is_lora(model):
        with holding(model, w), quiet(), peft_alone():
            # Without this PEFT would ask the hub whether the base model's vocabulary has changed.
            model.module.save_pretrained(str(folder), save_embedding_layers=False)  # type: ignore[operator]
        (folder / "README.md").unlink(missing_ok=True)  # an empty model card
    else:
        with holding(model, w):  # raises if w is not of this model
            _save(w, folder / WEIGHTS)
    _about(model, folder, head_takes)
    return folder


def save(model: Model, w: Params, folder: Path | str, head_takes: str | None = None) -> Path:
    """Write a method's final parameters: the model's own tensors or a pair of adapters as :func:`save_adapter` does,
    others, such as the heads of an ensemble, as plain tensors with ``fedfm.json``.
    """
    if set(w) == set(model.names) or weighed_by(w) is not None:
        return save_adapter(model, w, folder, head_takes)
    folder = _folder(folder)
    _save(w, folder / WEIGHTS)
    _about(model, folder)
    return folder


def rank_on_disk(folder: Path | str) -> int | None:
    """The rank of the LoRA that :func:`save_adapter` wrote, of a pair that of each; None for other adaptations."""
    path = Path(folder) / (GLOBAL if (Path(folder) / GLOBAL).exists() else "") / "adapter_config.json"
    return int(json.loads(path.read_text(encoding="utf-8"))["r"]) if path.exists() else None


def load_adapter(model: Model, folder: Path | str) -> Params:
    """The parameters that :func:`save_adapter` wrote.

    Raises:
        InputError: the files are missing, or of another model.
    """
    from safetensors.torch import load_file

    for part, file in WEIGHING.items():
        if (Path(folder) / file).exists():
            two = {name: load_adapter(model, Path(folder) / name) for name in (GLOBAL, LOCAL)}
            return Params.join(**two, **{part: Params(load_file(Path(folder) / file))})
    path = Path(folder) / (ADAPTER if _is_lora(model) else WEIGHTS)
    if not path.exists():
        raise InputError(f"{folder}: no {path.name} of adaptation {model.adaptation!r}")
    saved = load_file(path)
    state = model.params().state()
    short = {name: _peft_name(model, name) if _is_lora(model) else name for name in state}
    if missing := [name for name in state if short[name] not in saved]:
        raise InputError(f"{path}: no tensor {short[missing[0]]!r}, it is of another model")
    saved |= {short[name]: from_files(saved[short[name]], tensor) for name, tensor in state.items()}
    for name, tensor in state.items():
        if saved[short[name]].shape != tensor.shape:
            raise InputError(
                f"{path}: {short[name]} is {tuple(saved[short[name]].shape)}, expected {tuple(tensor.shape)}"
            )
    return Params({name: saved[short[name]].to(tensor.dtype) for name, tensor in state.items()})


def save_module(model: Model, out: Path | str) -> None:
    """Write all of the module's tensors as safetensors, and ``fedfm.json``."""
    _save(model.module.state_dict(), _folder(out) / WEIGHTS)
    _about(model, Path(out))


def export(model: Model, w: Params, to: Target, out: Path | str, head_takes: str | None = None) -> Path:
    """Write the model with weights ``w``, its class names and its preprocessing into the folder ``out``.

    Args:
        model: on any device.
        w: trained tensors of this model.
        to: ``peft``: an adapter for ``PeftModel.from_pretrained``, of a classifier with what ``AutoPeftModel...``
            needs beside it (see :mod:`fedfm.models.export_base`); ``hf``: the whole model with the adapter merged into
            it, for ``AutoModelFor....from_pretrained(out)``; ``torch``: the same tensors as safetensors, and a json.
        out: created if it does not exist.
        head_takes: the transform of features before the head, which ``fedfm.json`` names.

    Raises:
        InputError: this form does not support the model.
    """
    from fedfm.models import export_base

    if to not in ("peft", "hf", "torch"):
        raise InputError(f"--to: unknown {to!r}, expected peft, hf or torch")
    if to != "peft" and weighed_by(w) == GATE:
        raise InputError(f"--to {to}: two experts and a gate are no one model: use peft, which writes each")
    if to == "peft":
        if not _is_lora(model):
            other = "torch" if model.added_bias or _of_transformers(model.module) is None else "hf or torch"
            raise InputError(f"--to peft: adaptation {model.adaptation!r} makes no PEFT adapter: use {other}")
        if model.spec.weights == "random":
            raise InputError(
                "--to peft: the adapter is for the run's own random weights, which no file holds: use hf or torch"
            )
        if is_pooled_encoder(unwrap(model.module)):
            raise InputError(f"--to peft: {_NO_CLASS}, onto which an adapter could be put: use torch")
        save_adapter(model, w, out)
        export_base.complete(model, Path(out))
    elif to == "hf":
        module = _of_transformers(merge(model, w))
        if module is None:
            if model.adaptation == "prompt":
                raise InputError("--to hf: a model of transformers has no place for learned context vectors: use torch")
            if model.task.two_encoders:
                other = "peft, whose adapter goes onto the CLIPModel, or torch" if _is_lora(model) else "torch"
                raise InputError(f"--to hf: a zero-shot classifier is no class of transformers: use {other}")
            if is_pooled_encoder(unwrap(model.module)):
                raise InputError(f"--to hf: {_NO_CLASS}: use torch")
            raise InputError(f"--to hf: {model.spec.name!r} is no transformers model: use torch")
        if head_takes is not None:  # the folder would load, and predict something else
            raise InputError(
                f"--to hf: this head takes {head_takes}, which no transformers model does: use `fedfm predict`, or "
                "torch and do it yourself"
            )
        _without_added_bias(model, module)
        with quiet():
            module.save_pretrained(str(_folder(out)))
    else:
        _save(merge(model, w).state_dict(), _folder(out) / WEIGHTS)
        _about(model, Path(out), head_takes)
        if is_pooled_encoder(classifier := unwrap(model.module)):
            with quiet():
                classifier.config.save_pretrained(str(Path(out) / "encoder"))
    _save_tools(model, Path(out))
    return Path(out)


def merge(model: Model, w: Params) -> Any:
    """A copy of the module with weights ``w``, on the CPU, with LoRA merged.

    Of a quantised base it has the weights that the bits stand for, in ``model.dtype``: it computes what the run has
    trained and judged, at the original's size.

    Raises:
        InputError: a layer computes something else with merged weights, as :func:`merging.merge` tells.
    """
    from fedfm.models import merging

    with holding(model, w):
        module: Any = copy.deepcopy(model.module)
    from fedfm.models import quantised

    module = quantised.rebuild(module, DTYPES[model.spec.dtype]) if quantised.kind_of(module) else module.cpu()
    if _is_lora(model):
        with quiet(), peft_alone():
            _untie(module)
            module = merging.merge(module)
    module._forward_pre_hooks.clear()
    return module


def _untie(module: Any) -> None:
    """Give embeddings and head a weight each where they share one and LoRA is on one of them alone."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    whole = module.get_base_model()
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    if head is None:
        return
    ends = whole.get_input_embeddings(), head
    bare: list[Any] = [getattr(end, "base_layer", end) for end in ends]
    if bare[0].weight is bare[1].weight and any(isinstance(end, BaseTunerLayer) for end in ends):
        bare[1].weight = nn.Parameter(bare[1].weight.detach().clone(), requires_grad=False)
        whole.config.tie_word_embeddings = False


@contextmanager
def holding(model: Model, w: Params) -> Iterator[None]:
    """Context manager: the model has the weights ``w``; restores its own afterwards."""
    own = model.params()
    model.load(w)
    try:
        yield
    finally:
        model.load(own)


def _is_lora(model: Model) -> bool:
    return model.adaptation in LORA and hasattr(model.module, "peft_config")


def _without_added_bias(model: Model, module: Any) -> None:
    """Take a bias of zeros out of the head of a class that has none.

    Raises:
        InputError: the bias is not zero, and transformers would leave it out as it loads.
    """
    if not model.added_bias:
        return
    head: Any = module.get_submodule(model.parts.head)
    if head.bias.any():
        raise InputError(
            f"--to hf: the run gave the head a bias, and {type(module).__name__} has no place for it: use `fedfm "
            "predict`, or torch, or a method that trains the head as it is, such as fedavg"
        )
    head.bias = None


def _of_transformers(module: Any) -> Any:
    """What ``save_pretrained`` writes for transformers; None where that is not all of the model."""
    if is_dual_encoder(module):
        return module.clip if module.context is None else None
    return module if hasattr(module, "save_pretrained") else None


def _save_lora(model: Model, w: Params, rank: int, folder: Path) -> None:
    """Write an adapter of another rank than the model's, with the model's alpha."""
    from fedfm.models.adapters import lora

    w.check_like(lora.layout_at(model.layout, rank))
    _write_lora(model, w, rank, folder)


def _lora_state(model: Model) -> dict[str, Tensor]:
    """All tensors of the adapter, also those that are not trained, such as A of ffa_lora."""
    return {name: t for name, t in model.module.state_dict().items() if ".lora_" in name or name in model.names}


def _write_lora(model: Model, tensors: Mapping[str, Tensor], rank: int | None, folder: Path) -> None:
    """PEFT's two files; of two encoders, those for the model of transformers. ``rank``: None is the model's."""
    config = copy.deepcopy(_config(model))
    if is_dual_model(model):
        _name_paths(config, model.module)
    else:
        config = in_names_of_peft(config, model.module) or config
    config.r, config.inference_mode = rank or config.r, True
    config.base_model_name_or_path = config.base_model_name_or_path or model.spec.name
    config.save_pretrained(str(folder))
    tensors = in_files(tensors, model.module)
    _save({_peft_name(model, name): tensor for name, tensor in tensors.items()}, folder / ADAPTER)


def _config(model: Model) -> Any:
    """PEFT's configuration of the model's adapter."""
    module: Any = model.module
    return module.peft_config["default"]


def _name_paths(config: Any, module: nn.Module) -> None:
    """Name what is adapted by paths of the model of transformers, each with its own rank and alpha.

    Here all paths begin with ``clip.``, there none does: a name or a pattern that begins so would fit nothing there.
    """
    from peft.tuners.lora import LoraLayer

    found = {name.partition(".clip.")[2]: m for name, m in module.named_modules() if isinstance(m, LoraLayer)}
    ranks: dict[str, Any] = {name: m.r["default"] for name, m in found.items()}
    alphas: dict[str, Any] = {name: m.lora_alpha["default"] for name, m in found.items()}
    config.target_modules, config.exclude_modules = sorted(found), None
    config.rank_pattern = {name: r for name, r in ranks.items() if r != config.r}
    config.alpha_pattern = {name: alpha for name, alpha in alphas.items() if alpha != config.lora_alpha}


def _folder(path: Path | str) -> Path:
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _peft_name(model: Model, name: str) -> str:
    """A parameter's name in PEFT's file."""
    if is_dual_model(model):
        name = name.replace("base_model.model.clip.", "base_model.model.", 1)
    return name.replace(".modules_to_save.default", "").replace(".default.", ".")


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    found, places = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.data_ptr() in places:  # the format does not allow tensors that share memory, as tied ones do
            tensor = tensor.clone()
        places.add(tensor.data_ptr())
        found[name] = tensor
    save_file(found, path, {"format": "pt"})


def _about(model: Model, folder: Path, head_takes: str | None = None) -> None:
    about: dict[str, Any] = {
        "model": model.spec.name,
        **model.task.describe(model),
        "adaptation": model.adaptation,
        "classes": list(model.classes),
        "fingerprint": model.fingerprint,
        "names": list(model.names),
        **({} if model.tools.tokenizer is None else {"max_length": model.tools.max_length}),
    }
    if is_pooled_encoder(module := unwrap(model.module)):
        about["head_reads"] = module.pooling
    if head_takes is not None:
        about["head_takes"] = head_takes
    (folder / ABOUT).write_text(to_json(about, indent=2) + "\n", encoding="utf-8")


def _save_tools(model: Model, folder: Path) -> None:
    tools = [tool for tool in (model.tools.processor, model.tools.tokenizer) if tool is not None]
    if not tools:  # of a head on features: it needs no transformers
        return
    with quiet():
        for tool in tools:
            if tool is model.tools.tokenizer:
                tool = copy.copy(tool)
                tool.model_max_length = model.tools.max_length  # as in training: `truncation=True` cuts there
            tool.save_pretrained(str(folder))
