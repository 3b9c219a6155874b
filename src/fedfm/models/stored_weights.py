"""Loads modules whose original weights stay in the files: the module is quantised, or has placeholders."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfm.errors import InputError
from fedfm.models import devices, families, quantised, stored_bits, stored_files, stored_formats
from fedfm.models.checkpoint import Difference
from fedfm.models.locate import DTYPES
from fedfm.models.quantised_maps import of_folder
from fedfm.models.refusals import refusal
from fedfm.models.spec import ModelSpec
from fedfm.models.weights import Read, load, new_modules


def hollow(
    auto: Any, path: Path | str, spec: ModelSpec, config: Any, *, head: bool
) -> tuple[Read, Mapping[str, Tensor]] | None:
    """As :func:`module_of`, but each weight is a single zero, expanded to the weight's shape.

    The result is None if the names in the files differ from the module's, because then only a complete load shows
    which weights are missing.
    """
    from accelerate import init_empty_weights

    if stored_formats.is_widened(config):
        return None
    stored, plain = quantised.of_folder(config), copy.deepcopy(config)
    if stored is not None:
        del plain.quantization_config
    with init_empty_weights(include_buffers=False):
        module = _skeleton(auto, path, spec, plain)
    _read_generation_settings(module, path)
    checkpoint = stored_files.checkpoint_of(path, spec.name)
    stored_formats.check(checkpoint, spec.name)
    weights = quantised.Unquantised(module, checkpoint, alike=stored is None)
    if stored is not None:
        stored_bits.check(checkpoint, stored, weights.by_file, path)
    last = families.find(module, config.model_type).head if head else None
    if not quantised.readable(weights, module, last, DTYPES[spec.dtype]):
        return None
    found = Difference(module, path, weights.missing, weights.leftovers if stored is None else set(), {})
    if found.surplus():
        return None
    names, notices = found.judge(head=head)
    new = new_modules(module, config.model_type, names) if head else []
    quantised.empty(module, new)
    return Read(module, names, notices), weights if stored is None else checkpoint


def module_of(
    auto: Any, path: Path | str, spec: ModelSpec, config: Any, seed: int, *, head: bool
) -> tuple[Read, Mapping[str, Tensor] | None]:
    """The module, and the checkpoint's weights if the module is quantised.

    The fingerprint needs the original weights. The original weights of a large model do not fit into memory next to the
    quantised weights. So they are read from the files one by one, if the files use the module's names, as the files of
    most language models do.
    """
    dtype = DTYPES[spec.dtype]
    where = devices.placement(spec.device)
    stored = of_folder(config)
    if stored is None and spec.quantization is None:
        return load(auto, path, spec, config, seed, dtype, head=head, **where), None
    quantised.describe(spec, config)  # refuses settings that do not fit together
    plain = copy.deepcopy(config)
    if stored is not None:
        del plain.quantization_config
    with torch.device("meta"):
        skeleton = _skeleton(auto, path, spec, plain)
    checkpoint = stored_files.checkpoint_of(path, spec.name)
    lazily = quantised.Unquantised(skeleton, checkpoint, alike=stored is None)
    weights: Mapping[str, Tensor] = checkpoint if stored is not None else lazily
    if stored is not None:
        stored_bits.check(checkpoint, stored, lazily.by_file, path)
    missing = lazily.missing
    last = families.find(skeleton, config.model_type).head if head else None
    if stored is None and not quantised.readable(lazily, skeleton, last, dtype):
        whole = load(auto, path, spec, config, seed, dtype, head=head)
        weights, missing = whole.module.state_dict(), whole.new
    new = new_modules(skeleton, config.model_type, missing) if head else []
    out = skeleton.get_output_embeddings()
    keep = [*new, *(name for name, m in skeleton.named_modules() if m is out and out is not None)]
    keep += quantised.odd_maps(skeleton, spec) if stored is None else []  # a quantised folder is not changed
    bits = quantised.settings(spec, stored, keep)
    with_bits = copy.deepcopy(config)
    if stored is not None:
        with_bits.quantization_config = bits.to_dict()
    else:
        where = where | {"quantization_config": bits}
    if "device_map" not in where:
        where = where | {"device_map": {"": devices.pick(spec.device)}}
    try:
        read = load(auto, path, spec, with_bits, seed, dtype, head=head, **where)
    except (InputError, AttributeError):  # transformers fails on missing quantised weights, and does not name them
        if stored is not None:
            surplus = {n for n in lazily.leftovers if not stored_bits.is_companion(n)}
            Difference(skeleton, path, missing, surplus, {}).judge(head=head)
        raise
    quantised.keep_format(read.module)
    return read, weights


def _read_generation_settings(module: Any, path: Path | str) -> None:
    """Give a module that was made from its configuration the generation settings of its folder, if it has some."""
    from transformers import GenerationConfig

    if not module.can_generate():
        return
    for about in ({}, {"config_file_name": "config.json", "_from_model_config": True}):  # as in from_pretrained
        with contextlib.suppress(OSError):
            module.generation_config = GenerationConfig.from_pretrained(path, **about)
            return


def _skeleton(auto: Any, path: Path | str, spec: ModelSpec, config: Any) -> Any:
    """The module for a configuration, on the device that the surrounding context sets.

    Raises:
        InputError: transformers has no such model.
    """
    try:
        return auto.from_config(config, dtype=DTYPES[spec.dtype])
    except ValueError as error:
        raise refusal(path, spec.name, error) from None
