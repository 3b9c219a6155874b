"""Whether a base model is quantised, according to its configuration or its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def of_folder(config: Any) -> dict[str, Any] | None:
    """``quantization_config`` of a folder that bitsandbytes quantised; None for other folders."""
    found = getattr(config, "quantization_config", None)
    stored = {} if found is None else dict(found if isinstance(found, Mapping) else found.to_dict())
    return stored if stored.get("load_in_8bit") or stored.get("load_in_4bit") else None


def settings(config: Any) -> dict[str, Any] | None:
    """``quantization_config`` of a configuration or of its text model; None if the weights are not quantised."""
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found if isinstance(found, Mapping) else found.to_dict())
    return None


def maps(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, module) of each quantised linear map, including the maps in PEFT's wrappers."""
    return ((path, m) for path, m in module.named_modules() if type(m).__module__.startswith("bitsandbytes."))
