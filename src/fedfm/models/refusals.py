"""Error messages for a model that a library cannot read."""

from __future__ import annotations

import re
from pathlib import Path

from fedfm.errors import InputError
from fedfm.models.locate import BUILT_IN


def refusal(path: Path | str, name: str, error: Exception) -> InputError:
    """The error for a model that transformers could not read."""
    from huggingface_hub import is_offline_mode

    first = first_of(error)
    if found := re.search(r"(\w+)Config'> for this kind of AutoModel: (?:AutoModelFor)?(\w+)", str(error)):
        first = f"transformers has no {found[1]} for {found[2]}, which model.task and the data need"
        return InputError(f"model.name: {name!r} does not fit: {first}", key="model.name")
    if isinstance(path, Path):
        return InputError(f"model.name: {path} cannot be read as a model: {first}", key="model.name")
    if is_offline_mode():
        first += " (HF_HUB_OFFLINE is set: nothing is downloaded)"
    return InputError(
        f"model.name: {name!r} is not built in ({', '.join(BUILT_IN)}), no folder here, "
        f"and no hub id that could be read: {first}",
        key="model.name",
    )


def first_of(error: Exception) -> str:
    """The first line of a library's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
