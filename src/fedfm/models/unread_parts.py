"""Finds parts of a model's folder that are not read, and refuses weights that would be read as other values.

Some parts are not read: other files of weights, adapters, code, modules that sentence-transformers runs after the
model, and misspelt keys. Integer weights without settings for their scale would be read as other values.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fedfm.errors import InputError
from fedfm.models import quantised_maps
from fedfm.models.checkpoint import some
from fedfm.models.configuration import OF_EXPERTS
from fedfm.models.locate import ADAPTER, BUILT_IN, stored_table
from fedfm.models.spec import ModelSpec

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHERS = ("*.safetensors", "pytorch_model*.bin", "tf_model*.h5", "flax_model*.msgpack")
_OF_NUMBERS = ("F", "BF")  # beginnings of the names of floating-point dtypes in safetensors
POOLING = "sentence_pooling"  # a configuration has this key if the task computes the pooling
_PARTS = "modules.json"  # lists the parts of a sentence-transformers model: transformer, pooling, further maps


def notices(path: Path | str, config: Any, spec: ModelSpec, *, answers: bool = False) -> list[str]:
    """Notices about the parts of a model's folder that are not read.

    For a hub id, the notices are only about its code and its keys. For random weights, they are only about its keys.

    Args:
        answers: whether the task generates answers.

    Raises:
        InputError: two files of the folder have a tensor of the same name, or integer weights have no scales.
    """
    if spec.name in BUILT_IN:
        return []
    from fedfm.models import unknown_keys

    found = unknown_keys.of_configuration(path, config)
    found += unknown_keys.of_generation(path) if answers else []
    if spec.weights == "pretrained":
        found += [*_own_code(path, config), *_of_router(path)]
    if spec.weights == "pretrained" and isinstance(path, Path):
        _refuse_doubles(path)
        if quantised_maps.settings(config) is None:
            _refuse_whole_numbers(path)
        found += [*_other_weights(path), *_adapters(path), *_parts_after_model(path, config)]
    return [f"model.name: {path} {text}" for text in found]


def _own_code(path: Path | str, config: Any) -> list[str]:
    named = sorted({str(of).partition(".")[0] + ".py" for of in (getattr(config, "auto_map", None) or {}).values()})
    if not named:
        return []
    return [
        f"names code of its own ({some(named)}), which is not run: transformers' own model of type "
        f"{config.model_type!r} computes with its weights"
    ]


def _of_router(path: Path | str) -> list[str]:
    table = stored_table(path, "config.json")
    if not any(of.get(OF_EXPERTS) for of in (table, *table.values()) if isinstance(of, dict)):
        return []
    return [
        f"has {OF_EXPERTS} = true in its config.json: the loss that balances its experts is not trained, and "
        "an export says false"
    ]


def _read_files(path: Path) -> set[str]:
    """Names of the files of weights that transformers reads."""
    if (path / _WHOLE).exists() or not (path / _INDEX).exists():
        return {_WHOLE}
    try:
        return set(json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()  # transformers reports what is wrong with the file


def _other_weights(path: Path) -> list[str]:
    read = _read_files(path)
    others = sorted({file.name for pattern in _OTHERS for file in path.glob(pattern)} - read)
    if not read or not others:
        return []
    return [f"has weights in several files: {some(sorted(read))} is read, and {some(others)} is not"]


def _adapters(path: Path) -> list[str]:
    places = sorted(file.parent.name for file in path.glob(f"*/{ADAPTER}"))
    return [f"has adapters of PEFT in folders inside ({some(places)}), which are not read"] if places else []


def _parts_after_model(path: Path, config: Any) -> list[str]:
    try:
        parts = json.loads((path / _PARTS).read_text(encoding="utf-8"))
        kinds = [str(part["type"]).rpartition(".")[2] for part in parts]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    after = [] if hasattr(config, POOLING) else [kind for kind in kinds if kind != "Transformer"]
    if not after:
        return []
    return [
        f"is a model of sentence-transformers: the parts after the model in its {_PARTS} are not read ({some(after)})"
    ]


def _refuse_doubles(path: Path) -> None:
    """Refuse a tensor that is in two of the files that are read: the order of the files would decide its value."""
    files = sorted(_read_files(path))
    if len(files) < 2:
        return
    count: Counter[str] = Counter()
    for name in files:
        try:
            with safe_open(path / name, "pt") as file:
                count.update(file.keys())
        except (OSError, SafetensorError):
            return  # transformers reports what is wrong with the file
    if twice := sorted(name for name, n in count.items() if n > 1):
        raise InputError(
            f"model.name: {path} has tensors in two of its files: {some(twice)}; save the model again, into an empty "
            "folder",
            key="model.name",
        )


def _refuse_whole_numbers(path: Path) -> None:
    """Refuse integer weights without settings for their scale: transformers would use them unscaled."""
    odd: list[str] = []
    for name in sorted(_read_files(path)):
        try:
            with safe_open(path / name, "pt") as file:
                odd += [f"{key} ({kind})" for key, kind in _kinds(file) if not kind.startswith(_OF_NUMBERS)]
        except (OSError, SafetensorError):
            return  # transformers reports what is wrong with the file
    if odd:
        raise InputError(
            f"model.name: {path} has weights that are not floating-point numbers: {some(odd)}, and its config.json has "
            "no quantization_config that says how they were rounded; save the model again, in float32 or bfloat16",
            key="model.name",
        )


def _kinds(file: Any) -> Iterator[tuple[str, str]]:
    """(name, dtype) of tensors that are certainly weights; others, e.g. masks and positions, may be integers."""
    return ((key, str(file.get_slice(key).get_dtype())) for key in file.keys() if key.endswith(".weight"))  # noqa: SIM118
