"""Puts the base of an exported adapter into the adapter's folder, so that the adapter loads with the new classes.

An adapter's file names its base, and the base's own ``config.json`` does not have the new classes. So the folder gets
the configuration with the names of the classes, and a folder ``base/`` with that configuration and the base's weights,
as hard links. A head of another size is left out of the weights, because the adapter has the new head. A run can hold
the weights of experts in 4 bits, but bitsandbytes cannot load such weights. After such a run ``base/`` has the
dequantised values of all quantised weights. The generation settings in ``base/`` list all tokens that end the
run's answers.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.core import new_folders
from fedfm.core.text import to_json
from fedfm.data.user_functions import is_function
from fedfm.models import configuration, quantised, quantised_maps, stored_formats
from fedfm.models.adapters.pair_names import GLOBAL, LOCAL
from fedfm.models.adapters.peft_alone import peft_alone
from fedfm.models.architectures.dual_encoder import DualEncoder
from fedfm.models.families import unwrap
from fedfm.models.locate import DTYPES, locate
from fedfm.models.model import Model
from fedfm.models.quiet import quiet

BASE, CONFIG, BITS = "base", "adapter_config.json", "quantization.json"
_GENERATION = "generation_config.json"
_INDEX = "model.safetensors.index.json"


def complete(model: Model, folder: Path) -> bool:
    """Write ``config.json`` and ``base/`` into the folder of an adapter, or pair of adapters, for a transformers model.

    If ``model.quantization`` rounds weights while loading, ``base/quantization.json`` has the settings of the rounding.

    Returns:
        Whether ``base/`` was written. It is written if the base's weights are in files, or if experts are quantised.
    """
    whole: Any = unwrap(model.module)
    module = whole.clip if isinstance(whole, DualEncoder) else whole
    if not hasattr(getattr(module, "config", None), "save_pretrained") or is_function(model.spec.name):
        return False
    config, bits = _plain(module.config, rounded=model.spec.quantization is not None)
    in_files = configuration.read(locate(model.spec.name), model.spec)
    if stored_formats.is_widened(in_files):
        config = copy.deepcopy(config)
        config.quantization_config = quantised_maps.settings(in_files)
    with quiet():
        config.save_pretrained(folder)
    in_bits = quantised.has_experts(module)
    files = [] if in_bits else _weights(model.spec.name)
    about: dict[str, Any] = {}
    heard = hasattr(model.tools.processor, "sampling_rate")
    kind = "image" if model.tools.tokenizer is None else "audio" if heard else "text"
    if (of := model.task.peft_type(kind)) is not None:
        about["task_type"] = of  # without a task type, PEFT would search for a class by name
    if files:
        (folder / BASE).mkdir()
        with quiet():
            config.save_pretrained(folder / BASE)
        if bits is not None:
            (folder / BASE / BITS).write_text(to_json(bits, indent=2) + "\n", encoding="utf-8")
        _link_all(files, folder / BASE, _shapes_of_new(model, module))
    elif in_bits:
        _write_numbers(model, folder / BASE)
    if (files or in_bits) and (settings := model.task.generation_settings(model)):
        _write_generation(settings, module, folder / BASE / _GENERATION)
    if files or in_bits:
        about["base_model_name_or_path"] = str((new_folders.place_of(folder) / BASE).resolve())
    for path in (folder / CONFIG, folder / GLOBAL / CONFIG, folder / LOCAL / CONFIG):
        if path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(to_json(old | about, indent=2) + "\n", encoding="utf-8")
    return bool(files or in_bits)


def _write_numbers(model: Model, folder: Path) -> None:
    """Write the base with its dequantised values, in ``model.dtype``."""
    base: Any = copy.deepcopy(model.module)
    with quiet(), peft_alone():
        base = base.unload()
        quantised.make_plain(base, DTYPES[model.spec.dtype])
        base.cpu().save_pretrained(str(folder))


def _write_generation(settings: dict[str, Any], module: Any, path: Path) -> None:
    """Write the base's generation settings with the values of ``settings``, in place of a link to the base's file."""
    own = module.generation_config.to_dict()
    if path.exists():
        own = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
    own.pop("_from_model_config", None)  # with this key, transformers may replace the settings by config.json's
    path.write_text(to_json(own | settings, indent=2) + "\n", encoding="utf-8")


def _plain(config: Any, *, rounded: bool) -> tuple[Any, dict[str, Any] | None]:
    """The configuration of the weights in the files, and the rounding that loading applies, if any."""
    found = quantised.of_folder(config) if rounded else None
    if found is None:
        return config, None
    config = copy.deepcopy(config)
    del config.quantization_config
    return config, {k: v for k, v in found.items() if not k.startswith("_") and k != "quant_method"}


def _weights(name: str) -> list[Path]:
    """The files of weights for a model's name, with their index; [] if the model is in no folder."""
    place = locate(name)
    if isinstance(place, str):
        from transformers.utils import cached_file

        found = None
        with contextlib.suppress(OSError), quiet():
            found = cached_file(place, "config.json", local_files_only=True)
        if found is None:
            return []
        place = Path(found).parent
    files = sorted(place.glob("model*.safetensors*")) if place.is_dir() else []
    return [*files, *(place / name for name in (_GENERATION,) if (place / name).is_file())] if files else []


def _shapes_of_new(model: Model, module: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor, by name, in the modules that are new for the task."""
    found: dict[str, tuple[int, ...]] = {}
    for path in model.new:
        part: Any = module.get_submodule(path)
        part = part.modules_to_save["default"] if hasattr(part, "modules_to_save") else part
        found |= {f"{path}.{name}": tuple(tensor.shape) for name, tensor in part.state_dict().items()}
    return found


def _link_all(files: list[Path], folder: Path, new: Mapping[str, tuple[int, ...]]) -> None:
    """Put all files into the folder; a file is linked unless it has a new module's tensor in another shape."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    dropped: set[str] = set()
    for file in files:
        other: set[str] = set()
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as stored:
                names = list(stored.keys())
                other = {n for n in names if n in new and tuple(stored.get_slice(n).get_shape()) != new[n]}
                if other:
                    kept = {n: stored.get_tensor(n) for n in names if n not in other}
                    save_file(kept, folder / file.name, stored.metadata() or {"format": "pt"})
        if not other:
            _link(file, folder / file.name)
        dropped |= other
    index = folder / _INDEX
    if dropped and index.exists():
        table = json.loads(index.read_text(encoding="utf-8"))
        table["weight_map"] = {n: f for n, f in table["weight_map"].items() if n not in dropped}
        index.unlink()  # it is a link: to write into it would change the original
        index.write_text(to_json(table, indent=2) + "\n", encoding="utf-8")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another disk
        target.symlink_to(source.resolve())
