"""Loads a module's weights: whole, quantised, or not at all; from files in Hugging Face's format."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfm import seeds
from fedfm.errors import InputError
from fedfm.models import devices, families, quantised
from fedfm.models.names import BUILT_IN, DTYPES
from fedfm.models.spec import ModelSpec


def hollow(
    auto: Any, path: Path | str, spec: ModelSpec, config: Any, task: str
) -> tuple[nn.Module, set[str], Mapping[str, Tensor]] | None:
    """As :func:`module_of`, with one zero in place of all numbers of each weight; None if the files have other names
    than the module, so that only a whole load tells what is missing.
    """
    from accelerate import init_empty_weights

    stored, plain = quantised.of_folder(config), copy.deepcopy(config)
    if stored is not None:
        del plain.quantization_config
    with init_empty_weights(include_buffers=False):
        module = auto.from_config(plain, dtype=DTYPES[spec.dtype])
    checkpoint = quantised.StoredWeights(path)
    weights = quantised.Unquantised(module, checkpoint, alike=stored is None)
    if not quantised.readable(weights, module, families.find(module, config.model_type).head, DTYPES[spec.dtype]):
        return None
    new = new_modules(module, config.model_type, weights.missing) if task == "classification" else []
    quantised.empty(module, new)
    return module, weights.missing, weights if stored is None else checkpoint


def module_of(
    auto: Any, path: Path | str, spec: ModelSpec, config: Any, seed: int, task: str
) -> tuple[nn.Module, set[str], Mapping[str, Tensor] | None]:
    """The module, the names of the weights that the checkpoint lacks, and the checkpoint's weights if it is quantised.

    The fingerprint needs the weights as they were, which a large model has no room for beside the quantised ones: they
    are read from the files one by one where the files have the module's names, as those of most language models do.
    """
    dtype = DTYPES[spec.dtype]
    where = devices.placement(spec.device)
    word = quantised.asked(spec, config)
    if word is None:
        return (*load(auto, path, spec, config, seed, dtype, **where), None)
    stored = quantised.of_folder(config)
    plain = copy.deepcopy(config)
    if stored is not None:
        del plain.quantization_config
    with torch.device("meta"):
        skeleton = auto.from_config(plain, dtype=dtype)
    checkpoint = quantised.StoredWeights(path)
    lazily = quantised.Unquantised(skeleton, checkpoint, alike=stored is None)
    weights: Mapping[str, Tensor] = checkpoint if stored is not None else lazily
    missing = lazily.missing
    head = families.find(skeleton, config.model_type).head
    if stored is None and not quantised.readable(lazily, skeleton, head, dtype):
        whole, missing = load(auto, path, spec, config, seed, dtype)
        weights = whole.state_dict()
    new = new_modules(skeleton, config.model_type, missing) if task == "classification" else []
    out = skeleton.get_output_embeddings()
    keep = [*new, *(name for name, m in skeleton.named_modules() if m is out and out is not None)]
    keep += quantised.odd_maps(skeleton, spec) if stored is None else []  # a folder's bits are as they are
    bits = quantised.settings(spec, stored, keep)
    with_bits = copy.deepcopy(config)
    if stored is not None:
        with_bits.quantization_config = bits.to_dict()
    else:
        where = where | {"quantization_config": bits}
    if "device_map" not in where:
        where = where | {"device_map": {"": devices.pick(spec.device)}}
    module, missing = load(auto, path, spec, with_bits, seed, dtype, **where)
    quantised.keep_format(module)
    return module, missing, weights


def load(
    auto: Any, path: Path | str, spec: ModelSpec, config: Any, seed: int, dtype: torch.dtype, **where: Any
) -> tuple[nn.Module, set[str]]:
    """The module, and the names of the weights that the checkpoint lacks.

    Args:
        where: ``device_map`` and ``quantization_config`` of transformers' ``from_pretrained``; none: on the CPU.
    """
    if spec.weights == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeds.derive(seed, "weights"))
            try:
                module: nn.Module = auto.from_config(config, **_attention(spec)).to(dtype)
            except Exception as error:  # incompatible options fail anywhere
                if spec.options:
                    raise InputError(f"model.options: {first_of(error)}") from None
                if isinstance(error, ValueError):
                    raise refusal(path, spec.name, error) from None
                raise
        return module, set()
    from safetensors import SafetensorError

    if isinstance(path, Path) and not any(path.glob("*.safetensors")):
        if pickled := next((f.name for p in ("*.bin", "*.pt", "*.pth", "*.ckpt") for f in sorted(path.glob(p))), ""):
            raise InputError(
                f"model.name: {path} has {pickled}, expected model.safetensors (pickled weights are not read)"
            )
        raise InputError(
            f'model.name: {spec.name!r} is an architecture without weights: set model.weights = "random", '
            "or make weights with `fedfm pretrain` and name their folder"
        )
    try:
        # It draws the missing weights, which must neither depend on the global generator nor change it.
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
                **_attention(spec),
                **where,
            )
    except ImportError as error:
        raise InputError(f"model.attention: {first_of(error)}") from None
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise refusal(path, spec.name, error) from None
    mismatched = {entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"]}
    return module, set(info["missing_keys"]) | mismatched


def new_modules(module: nn.Module, model_type: str, missing: set[str]) -> list[str]:
    """Paths of the modules that were created for this task: the whole head, and modules that the checkpoint lacks.
    They do not nest.
    """
    head = families.find(module, model_type).head
    if not head:
        raise InputError(f"model.name: no classification head found in a model of type {model_type!r}")
    known = {name for name, _ in module.named_parameters()}
    paths = {head.partition(".")[0], *(name.rpartition(".")[0] for name in missing & known)}
    top = sorted(p for p in paths if not any(p != q and p.startswith(f"{q}.") for q in paths))
    return [p for p in top if p]


def first_of(error: Exception) -> str:
    """The first line of a library's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def refusal(path: Path | str, name: str, error: Exception) -> InputError:
    """The error of a model that transformers could not read."""
    from huggingface_hub import is_offline_mode

    first = first_of(error)
    if found := re.search(r"(\w+)Config'> for this kind of AutoModel: (?:AutoModelFor)?(\w+)", str(error)):
        first = f"transformers has no {found[1]} for {found[2]}, which model.task and the data ask for"
        return InputError(f"model.name: {name!r} does not fit: {first}")
    if isinstance(path, Path):
        return InputError(f"model.name: {path} cannot be read as a model: {first}")
    if is_offline_mode():
        first += " (HF_HUB_OFFLINE is set: nothing is downloaded)"
    return InputError(
        f"model.name: {name!r} is not built in ({', '.join(BUILT_IN)}), no folder here, "
        f"and no hub id that could be read: {first}"
    )


def _attention(spec: ModelSpec) -> dict[str, str]:
    return {"attn_implementation": spec.attention} if spec.attention else {}
