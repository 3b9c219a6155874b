"""The fingerprint of a model: a hash of its weights and configuration, which all parties compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from fedfm.linalg.params import to_bytes

_VOLATILE = (  # keys of a configuration that do not change the model
    *("transformers_version", "_name_or_path", "dtype", "torch_dtype", "architectures", "problem_type"),
    *("id2label", "label2id", "num_labels", "pad_token_id", "finetuning_task"),
)


def fingerprint(
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    new: Iterable[str] = (),
    look: Callable[[str, Tensor], None] = lambda name, tensor: None,
) -> str:
    """SHA-256 of the configuration and of the weights in order of names, without the new modules.

    Args:
        look: a function that is called with each of these weights, so that each is read only once.
    """
    digest = hashlib.sha256(json.dumps(_stable(config), sort_keys=True, default=str).encode())
    for name in sorted(state):
        if any(name == n or name.startswith(f"{n}.") for n in new):
            continue
        tensor = state[name].detach().cpu().contiguous()
        look(name, tensor)
        digest.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}".encode())
        digest.update(to_bytes(tensor))
    return digest.hexdigest()


def _stable(config: Any) -> Any:
    if isinstance(config, Mapping):
        return {k: _stable(v) for k, v in config.items() if k not in _VOLATILE}
    return config
