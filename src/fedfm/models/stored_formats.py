"""Folders of quantised weights, in the format that ``quantization_config`` of their configuration names.

Weights in the format of bitsandbytes stay quantised in memory (:mod:`.quantised`). Weights in other formats, such as
fp8 and mxfp4, are dequantised by transformers while it reads the files, if it can. The kernels of these formats have no
gradients, or run on one kind of GPU only, so that silos would compute different values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fedfm.errors import InputError, first_line
from fedfm.models.checkpoint import some, tensors
from fedfm.models.quantised_maps import settings
from fedfm.models.stored_files import StoredWeights

BITSANDBYTES = "bitsandbytes"
_FLAG = "dequantize"  # an argument of a format's configuration class in transformers
_EIGHT = ("F8_E4M3", "F8_E5M2", "F4")  # safetensors' names of dtypes whose values need scales


def prepare(config: Any, name: str, *, random: bool) -> None:
    """Make transformers dequantise a folder's weights while it reads them, except weights in bitsandbytes' format.

    Args:
        config: the folder's configuration, which is changed.
        name: the folder's name, for messages.
        random: whether the weights are initialised at random instead of read.

    Raises:
        InputError: transformers cannot dequantise this format, or cannot do so on this machine.
    """
    stored = settings(config)
    if stored is None:
        return
    text = config.get_text_config(decoder=True)
    if getattr(config, "quantization_config", None) is None:
        del text.quantization_config  # transformers reads it at either place
    config.quantization_config = stored
    method = _method(stored)
    if method == BITSANDBYTES:
        return
    if random:
        del config.quantization_config
        return
    known = [m for m in _formats() if _can_widen(m)]
    if method not in known:
        raise InputError(
            f"model.name: {name!r} is quantised with {method}; fedfm reads the format of bitsandbytes as it is, and "
            f"dequantises {', '.join(known)}",
            key="model.name",
        )
    config.quantization_config = stored | {_FLAG: True}
    _try(config, name, method)


def is_widened(config: Any) -> bool:
    """Whether the folder's weights are dequantised while they are read, see :func:`prepare`."""
    stored = settings(config)
    return stored is not None and _method(stored) != BITSANDBYTES and bool(stored.get(_FLAG))


def check(stored: StoredWeights, name: str) -> None:
    """Refuse a folder with weights in 8 or 4 bits that lack their scales: transformers would use them unscaled.

    It would do so also where ``config.json`` has no ``quantization_config`` and so does not say that scales are needed.

    Raises:
        InputError: there are such weights; the error names the first.
    """
    heads = stored.heads()
    scales = {n for n in heads if "scale" in n.rpartition(".")[2]}
    bare = [n for n, (shape, dtype) in sorted(heads.items()) if dtype in _EIGHT and len(shape) > 1 and n not in scales]
    lacking = [n for n in bare if not any(s.startswith((f"{n}_", f"{n.rpartition('.')[0]}.")) for s in scales)]
    if lacking:
        raise InputError(
            f"model.name: {name} has {tensors(len(lacking))} of 8 or 4 bits without scales: {some(lacking)}; expected "
            "their scales, or weights that are saved as bfloat16",
            key="model.name",
        )


def notice(module: nn.Module, config: Any, name: str) -> str:
    """A notice about how the weights of a folder were read.

    Raises:
        InputError: some weights are still quantised.
    """
    method = _method(settings(config) or {})
    left = [n for n, p in module.named_parameters() if not p.is_floating_point() or p.element_size() == 1]
    if left:
        raise InputError(
            f"model.name: {name!r} is quantised with {method}, and transformers does not dequantise {some(left)}",
            key="model.name",
        )
    size = sum(p.numel() * p.element_size() for p in module.parameters()) / 2**20
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    return f"model.name: {name} stores its weights in {method}; they are read as {dtype}, which takes {size:,.1f} MiB"


def _method(stored: Mapping[str, Any]) -> str:
    """Name of the format; older folders of bitsandbytes do not state it."""
    found = stored.get("quant_method")
    if found is None and (stored.get("load_in_8bit") or stored.get("load_in_4bit")):
        return BITSANDBYTES
    return str(getattr(found, "value", found)) if found is not None else "an unnamed format"


def _formats() -> dict[str, Any]:
    """Configuration class of each format that transformers knows."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return dict(AUTO_QUANTIZATION_CONFIG_MAPPING)


def _can_widen(method: str) -> bool:
    """Whether transformers can dequantise safetensors in this format."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    reads = AUTO_QUANTIZER_MAPPING.get(method)
    return (
        _FLAG in inspect.signature(_formats()[method].__init__).parameters
        and reads is not None
        and "get_load_operations" in vars(reads)
    )


def _try(config: Any, name: str, method: str) -> None:
    """Refuse a folder whose format needs a library or a machine that is not here, or has invalid settings."""
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        reads = AutoHfQuantizer.from_config(config.quantization_config, pre_quantized=True)
        reads.validate_environment(device_map={"": torch.device("cpu")}, weights_only=True)
    except (ImportError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise InputError(
            f"model.name: {name!r} is quantised with {method}: {first_line(error)}", key="model.name"
        ) from None
