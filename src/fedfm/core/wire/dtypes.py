"""The dtypes that can be sent, by their names in a message's head."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
