"""What lets PEFT and transformers load an exported adapter of a classifier by its folder alone.

An adapter's file names its base, and a base's own ``config.json`` says nothing of new classes. So the folder gets the
configuration with the names of the classes, and a folder ``base/`` of that configuration and the base's weights, as
hard links.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from fedfm.core.text import to_json
from fedfm.models import quantised
from fedfm.models.model import Model
from fedfm.models.names import locate
from fedfm.models.quiet import quiet

BASE, CONFIG = "base", "adapter_config.json"


def complete(model: Model, folder: Path) -> bool:
    """Write ``config.json`` and ``base/`` beside the adapter of a classifier of transformers.

    Returns:
        Whether ``base/`` is there: it needs weights in files, which are not quantised.
    """
    module: Any = model.module
    config: Any = getattr(module, "config", None)
    if model.task != "classification" or not hasattr(config, "save_pretrained"):
        return False
    with quiet():
        config.save_pretrained(folder)
    files = None if quantised.kind_of(module) else _weights(model.spec.name)
    about = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if model.tools.tokenizer is not None:
        about["task_type"] = "SEQ_CLS"  # else PEFT would look for a class by its name
    if files:
        (folder / BASE).mkdir()
        with quiet():
            config.save_pretrained(folder / BASE)
        for file in files:
            _link(file, folder / BASE / file.name)
        about["base_model_name_or_path"] = str((folder / BASE).resolve())
    (folder / CONFIG).write_text(to_json(about, indent=2) + "\n", encoding="utf-8")
    return bool(files)


def _weights(name: str) -> list[Path]:
    """The files of weights of a model's name; none if it has no folder."""
    place = locate(name)
    if isinstance(place, str):
        from transformers.utils import cached_file

        found = None
        with contextlib.suppress(OSError), quiet():
            found = cached_file(place, "config.json", local_files_only=True)
        if found is None:
            return []
        place = Path(found).parent
    return sorted(place.glob("model*.safetensors*")) if place.is_dir() else []


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:  # another disk
        target.symlink_to(source.resolve())
