"""Reads trained parameters from the files of :mod:`fedfm.models.adapter_files`."""

from __future__ import annotations

import json
from pathlib import Path

from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.adapter_files import ADAPTER, WEIGHING, WEIGHTS, is_lora, peft_name
from fedfm.models.adapters.pair_names import GLOBAL, LOCAL
from fedfm.models.adapters.stacked import from_files
from fedfm.models.model import Model


def rank_on_disk(folder: Path | str) -> int | None:
    """The rank of the LoRA adapter or adapters that :func:`save_adapter` wrote; None for other adaptations."""
    path = Path(folder) / (GLOBAL if (Path(folder) / GLOBAL).exists() else "") / "adapter_config.json"
    return int(json.loads(path.read_text(encoding="utf-8"))["r"]) if path.exists() else None


def load_adapter(model: Model, folder: Path | str) -> Params:
    """The parameters that :func:`save_adapter` wrote.

    Raises:
        InputError: the files are missing, or belong to another model.
    """
    from safetensors.torch import load_file

    for part, file in WEIGHING.items():
        if (Path(folder) / file).exists():
            two = {name: load_adapter(model, Path(folder) / name) for name in (GLOBAL, LOCAL)}
            return Params.join(**two, **{part: Params(load_file(Path(folder) / file))})
    path = Path(folder) / (ADAPTER if is_lora(model) else WEIGHTS)
    if not path.exists():
        raise InputError(f"{folder}: no {path.name}, which adaptation {model.adaptation!r} needs")
    saved = load_file(path)
    state = model.params().state()
    short = {name: peft_name(model, name) if is_lora(model) else name for name in state}
    if missing := [name for name in state if short[name] not in saved]:
        raise InputError(f"{path}: no tensor {short[missing[0]]!r}: the file is of another model")
    saved |= {short[name]: from_files(saved[short[name]], tensor) for name, tensor in state.items()}
    for name, tensor in state.items():
        if saved[short[name]].shape != tensor.shape:
            raise InputError(
                f"{path}: {short[name]} is {tuple(saved[short[name]].shape)}, expected {tuple(tensor.shape)}"
            )
    return Params({name: saved[short[name]].to(tensor.dtype) for name, tensor in state.items()})
