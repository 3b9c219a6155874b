"""Whether a base is in few bits: by its configuration, and by the linear maps of its modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def of_folder(config: Any) -> dict[str, Any] | None:
    """``quantization_config`` of a configuration; None if its weights are not quantised."""
    found = getattr(config, "quantization_config", None)
    return None if found is None else dict(found if isinstance(found, Mapping) else found.to_dict())


def maps(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, module) of the quantised linear maps, below PEFT's wrappers."""
    return ((path, m) for path, m in module.named_modules() if type(m).__module__.startswith("bitsandbytes."))
