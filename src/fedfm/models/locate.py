"""Finds the model that a name in the [model] table means: a built-in model, a folder, a file or a hub id."""

from __future__ import annotations

import importlib.resources
import json
import re
from pathlib import Path
from typing import Any

import torch

from fedfm.errors import InputError, close

BUILT_IN = {  # folders in this package; the folders in architectures/ have no weights
    "nano-vit": "nano_vit",
    "nano-vit-fhe": "nano_vit_fhe",
    "nano-clip": "nano_clip",
    "nano-gpt2": "architectures/nano_gpt2",
    "preact-resnet": "architectures/preact_resnet",
    "preact-resnet-small": "architectures/preact_resnet_small",
    "vit-b16": "architectures/vit_b16",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ADAPTER = "adapter_config.json"
PREACT_RESNET = "fedfm_preact_resnet"  # model_type of our own residual network
_EXPECTED = f"expected {', '.join(BUILT_IN)}, a folder, a hub id or features"


def locate(name: str) -> Path | str:
    """The path of the model's folder or file; for a hub id the name itself, as a str.

    Raises:
        InputError: the name belongs to no folder or file of a model, and is not a hub id.
    """
    if not name:
        raise InputError(f"model.name: missing, {_EXPECTED}", key="model.name")
    if name in BUILT_IN:
        return Path(str(importlib.resources.files("fedfm.models") / BUILT_IN[name]))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            for command in ("pretrain", "distil"):
                if (path / f"{command}.json").exists():
                    raise InputError(
                        f"model.name: {path} is not finished: continue the `fedfm {command}` that began it",
                        key="model.name",
                    )
            if (path / ADAPTER).exists():
                raise no_whole_model(path)
            if (path / "manifest.json").exists():
                raise InputError(
                    f"model.name: {path} is a run, expected a model: write it by `fedfm export --to hf`",
                    key="model.name",
                )
            raise InputError(
                f"model.name: {path} has no config.json, expected a folder in the format of save_pretrained",
                key="model.name",
            )
        return path
    if path.is_file():
        if path.suffix != ".safetensors":
            raise InputError(
                f"model.name: {path} is a file, expected a folder with config.json and model.safetensors",
                key="model.name",
            )
        return path
    if "/" not in name and (near := close(name, [*BUILT_IN, "features"])):
        raise InputError(f"model.name: unknown {name!r}{near}", key="model.name")
    if path.is_absolute() or name.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(f"model.name: no folder {name}, {_EXPECTED}", key="model.name")
    return name


def no_whole_model(name: Path | str) -> InputError:
    """The error for a folder that has an adapter of PEFT."""
    return InputError(
        f"model.name: {name} has an adapter of PEFT ({ADAPTER}), expected a complete model: merge the adapter into its "
        "base, by `fedfm export --to hf` of its run or by PEFT's merge_and_unload, and name the merged model's folder; "
        f"to start without the adapter, name a folder without {ADAPTER}",
        key="model.name",
    )


def stored_file(place: Path | str, name: str) -> Path | None:
    """A file of a model's folder or hub id; None if there is none, or if the hub does not answer."""
    from transformers.utils import cached_file

    try:
        found = cached_file(str(place), name, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return None if found is None else Path(str(found))


def stored_table(place: Path | str, name: str) -> dict[str, Any]:
    """The JSON object in a file of a model's folder or hub id; {} if the file is missing or has no JSON object."""
    try:
        file = stored_file(place, name)
        found = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
