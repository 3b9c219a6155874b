"""Hash all inputs that determine the content of prepared rows; the hash names the file in :mod:`.row_cache`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfm.data.table import Table
from fedfm.linalg.params import to_bytes
from fedfm.models.model import Model


def describe_preparation(model: Model) -> str | None:
    """Describe the preprocessing; return None if that is not possible."""
    tools = model.tools
    said: dict[str, Any] = {"max_length": tools.max_length, "task": model.task.name}
    if tools.processor is not None:
        said |= {"processor": type(tools.processor).__name__, "how": tools.processor.to_dict()}
    elif tools.image is not None:
        if (settings := getattr(tools.image, "settings", None)) is None:
            return None
        said["image"] = settings
    if tools.tokenizer is not None:
        if not getattr(tools.tokenizer, "is_fast", False):
            return None
        made = json.loads(tools.tokenizer.backend_tokenizer.to_str())
        said["tokenizer"] = {k: v for k, v in made.items() if k not in ("truncation", "padding")}
        said["special"] = [tools.tokenizer.pad_token_id, tools.tokenizer.bos_token_id, tools.tokenizer.padding_side]
    import transformers

    said["versions"] = [transformers.__version__, torch.__version__]
    return json.dumps(said, sort_keys=True, default=str)


def sha256_of_frozen(model: Model) -> str:
    """Return the SHA-256 of frozen tensors, configuration, and all else that affects the last bits of features."""
    device, spec = model.device, model.spec
    where = [str(device.type), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    if device.type == "cuda":
        where += [torch.cuda.get_device_name(device), torch.backends.cuda.matmul.allow_tf32]
    digest = hashlib.sha256(json.dumps([model.fingerprint, spec.dtype, spec.attention, where]).encode())
    tensors = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
    for name in sorted(tensors.keys() - model.layout.slots.keys()):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\x1f{tensor.dtype}\x1f{tuple(tensor.shape)}".encode())
        digest.update(to_bytes(tensor))
    return digest.hexdigest()


def sha256_of_rows(table: Table, index: np.ndarray) -> str:
    """Return the SHA-256 of the rows as read, without labels and paths."""
    digest = hashlib.sha256(table.kind.encode())
    for piece in _pieces(table, index):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def _pieces(table: Table, index: np.ndarray) -> Iterator[bytes]:
    rows = (table.inputs[i] for i in index.tolist())
    if isinstance(table.inputs, np.ndarray):
        yield f"{table.inputs.dtype.str} {table.inputs.shape[1:]}".encode()
        yield from (np.ascontiguousarray(row).tobytes() for row in rows)
    elif table.kind == "image":
        yield from (row if isinstance(row, bytes) else Path(row).read_bytes() for row in rows)
    else:
        yield from (row.encode("utf-8", "surrogatepass") for row in rows)
