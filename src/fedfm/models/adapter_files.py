"""Writes trained parameters to files: LoRA in PEFT's format, other tensors as safetensors with ``fedfm.json``."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedfm.core.text import to_json
from fedfm.linalg.params import Params
from fedfm.models.adapters.adaptation import LORA
from fedfm.models.adapters.lora_names import rank_of
from fedfm.models.adapters.pair_names import GATE, GLOBAL, LOCAL, MIX, weighed_by
from fedfm.models.adapters.peft_alone import peft_alone
from fedfm.models.adapters.stacked import in_files, in_names_of_peft
from fedfm.models.families import unwrap
from fedfm.models.kinds import is_pooled_encoder
from fedfm.models.model import Model
from fedfm.models.model_kinds import is_dual_model
from fedfm.models.quiet import quiet

ADAPTER, WEIGHTS, ABOUT = "adapter_model.safetensors", "model.safetensors", "fedfm.json"
WEIGHING = {MIX: "mix.safetensors", GATE: "gate.safetensors"}  # files of the tensors that weigh two adapters


def save_adapter(model: Model, w: Params, folder: Path | str, head_takes: str | None = None) -> Path:
    """Write the trained tensors, and ``fedfm.json``, which names the model and the classes.

    LoRA of any rank is written as ``adapter_config.json`` and ``adapter_model.safetensors``. Other tensors are written
    as ``model.safetensors``. Two adapters are written as ``global/`` and ``local/``, and the tensors that weigh them
    as ``mix.safetensors`` or ``gate.safetensors``. Two adapters with a mix are also merged into one adapter. If their
    weights differ from row to row, both adapters have the weight 1/2 in the merged adapter.

    Args:
        head_takes: the transform of features before the head; ``fedfm.json`` then names this transform.

    Raises:
        KeyError, ValueError: ``w`` does not belong to this model.
    """
    folder = folder_at(folder)
    if (part := weighed_by(w)) is not None:
        for name in (GLOBAL, LOCAL):
            save_adapter(model, w.part(name), folder / name)
        write_tensors(w.part(part), folder / WEIGHING[part])
        if part == GATE:
            write_about(model, folder)
            return folder
        from fedfm.models.adapters.experts import one_adapter

        w = one_adapter(model, w)
    other = rank_of(w) != rank_of(model.params())
    if is_lora(model) and other and (rank := rank_of(w)):
        _save_lora(model, w, rank, folder)
    elif is_lora(model) and (is_dual_model(model) or in_names_of_peft(_config(model), model.module)):
        with holding(model, w):
            _write_lora(model, _lora_state(model), None, folder)
    elif is_lora(model):
        with holding(model, w), quiet(), peft_alone():
            # By default PEFT would ask the hub whether the base model's vocabulary has changed.
            model.module.save_pretrained(str(folder), save_embedding_layers=False)  # type: ignore[operator]
        (folder / "README.md").unlink(missing_ok=True)  # an empty model card
    else:
        with holding(model, w):  # raises if w does not belong to this model
            write_tensors(w, folder / WEIGHTS)
    write_about(model, folder, head_takes)
    return folder


def save(model: Model, w: Params, folder: Path | str, head_takes: str | None = None) -> Path:
    """Write a method's final parameters.

    The model's own tensors, or two adapters, are written by :func:`save_adapter`. Other parameters, e.g. the heads of
    an ensemble, are written as plain tensors with ``fedfm.json``.
    """
    if set(w) == set(model.names) or weighed_by(w) is not None:
        return save_adapter(model, w, folder, head_takes)
    folder = folder_at(folder)
    write_tensors(w, folder / WEIGHTS)
    write_about(model, folder)
    return folder


@contextmanager
def holding(model: Model, w: Params) -> Iterator[None]:
    """Context manager: within it the model has the weights ``w``; afterwards the previous weights are restored."""
    own = model.params()
    model.load(w)
    try:
        yield
    finally:
        model.load(own)


def is_lora(model: Model) -> bool:
    """Whether the model has a LoRA adapter from PEFT."""
    return model.adaptation in LORA and hasattr(model.module, "peft_config")


def _save_lora(model: Model, w: Params, rank: int, folder: Path) -> None:
    """Write an adapter whose rank differs from the model's, with the model's alpha."""
    from fedfm.models.adapters import lora

    w.check_like(lora.layout_at(model.layout, rank))
    _write_lora(model, w, rank, folder)


def _lora_state(model: Model) -> dict[str, Tensor]:
    """All tensors of the adapter, including untrained ones such as A of ffa_lora."""
    return {name: t for name, t in model.module.state_dict().items() if ".lora_" in name or name in model.names}


def _write_lora(model: Model, tensors: Mapping[str, Tensor], rank: int | None, folder: Path) -> None:
    """Write PEFT's two files; for a dual encoder they use the module paths of the transformers model.

    Args:
        rank: the adapter's rank; None means the rank of the model's own adapter.
    """
    config = copy.deepcopy(_config(model))
    if is_dual_model(model):
        _name_paths(config, model.module)
    else:
        config = in_names_of_peft(config, model.module) or config
    config.r, config.inference_mode = rank or config.r, True
    config.base_model_name_or_path = config.base_model_name_or_path or model.spec.name
    config.save_pretrained(str(folder))
    tensors = in_files(tensors, model.module)
    write_tensors({peft_name(model, name): tensor for name, tensor in tensors.items()}, folder / ADAPTER)


def _config(model: Model) -> Any:
    """PEFT's configuration of the model's adapter."""
    module: Any = model.module
    return module.peft_config["default"]


def _name_paths(config: Any, module: nn.Module) -> None:
    """Name the adapted modules by their paths in the transformers model, each with its own rank and alpha.

    In fedfm's module all paths begin with ``clip.``. In the transformers model no path does, so a name or pattern with
    this prefix would match nothing there.
    """
    from peft.tuners.lora import LoraLayer

    found = {name.partition(".clip.")[2]: m for name, m in module.named_modules() if isinstance(m, LoraLayer)}
    ranks: dict[str, Any] = {name: m.r["default"] for name, m in found.items()}
    alphas: dict[str, Any] = {name: m.lora_alpha["default"] for name, m in found.items()}
    config.target_modules, config.exclude_modules = sorted(found), None
    config.rank_pattern = {name: r for name, r in ranks.items() if r != config.r}
    config.alpha_pattern = {name: alpha for name, alpha in alphas.items() if alpha != config.lora_alpha}


def folder_at(path: Path | str) -> Path:
    """Return the path of the folder; create the folder if it is absent."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def peft_name(model: Model, name: str) -> str:
    """A parameter's name in PEFT's file."""
    if is_dual_model(model):
        name = name.replace("base_model.model.clip.", "base_model.model.", 1)
    return name.replace(".modules_to_save.default", "").replace(".default.", ".")


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy tensors to the CPU and write them to a safetensors file."""
    from safetensors.torch import save_file

    found, places = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        if tensor.data_ptr() in places:  # the format forbids tensors that share memory, e.g. tied weights
            tensor = tensor.clone()
        places.add(tensor.data_ptr())
        found[name] = tensor
    save_file(found, path, {"format": "pt"})


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_about(model: Model, folder: Path, head_takes: str | None = None, scale: str = "none") -> None:
    """Write ``fedfm.json``: model, adaptation and classes of the tensors in this folder, and their files' SHA-256."""
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
    if scale != "none":
        about["scale"] = scale
    about["sha256"] = {path.name: sha256_of_file(path) for path in sorted(folder.glob("*.safetensors"))}
    text = to_json(about, indent=2) + "\n"
    (folder / ABOUT).write_bytes(text.encode("utf-8", "backslashreplace"))  # a class may be no UTF-8: JSON escapes it
