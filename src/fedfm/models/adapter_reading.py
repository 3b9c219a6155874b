"""Reads trained parameters from the files of :mod:`fedfm.models.adapter_files`."""

from __future__ import annotations

import json
from pathlib import Path

from fedfm.core.text import from_json
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.adapter_files import ABOUT, ADAPTER, WEIGHING, WEIGHTS, is_lora, peft_name, sha256_of_file
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
        InputError: the files are missing or damaged, or belong to another model.
    """
    from safetensors.torch import load_file

    if faults := file_faults(Path(folder)):
        raise InputError(f"{faults[0]}: put back a copy of it")

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


def file_faults(folder: Path) -> list[str]:
    """Return a sentence about each file of tensors that is missing or differs from its SHA-256 in ``fedfm.json``.

    A folder without these checksums, which an earlier version wrote, has no faults.
    """
    path = folder / ABOUT
    try:
        about = from_json(path.read_bytes()) if path.exists() else {}
    except (OSError, ValueError):
        return [f"{path} is damaged"]
    given = about.get("sha256") if isinstance(about, dict) else None
    found = []
    for name, sha256 in (given if isinstance(given, dict) else {}).items():
        file = folder / Path(name).name
        if not file.is_file():
            found.append(f"{file} is missing")
        elif sha256_of_file(file) != sha256:
            found.append(f"{file} is damaged")
    return found
