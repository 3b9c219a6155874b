"""Files and folders that an experiment's TOML file names, relative to that file or to the working directory."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from fedfm.errors import InputError
from fedfm.models.locate import BUILT_IN

# Keys of files and folders, by table. In [method] they name models and runs that methods read.
KEYS = {
    "data": ("path", "hub"),
    "model": ("name",),
    "method": ("foundation", "model", "trained", "gate_backbone"),
    "run": ("root_certificates", "folder", "roster", "identity"),
}
_MADE = {"run.identity"}  # files that fedfm creates next to the experiment's file if they are absent


def resolve_paths(file: Path, table: Mapping[str, Any], changed: Container[str] = ()) -> dict[str, Any]:
    """The tables of a TOML file, whose relative paths are looked up in the file's folder first.

    Values that are not in that folder do not change: a path relative to the working directory, a built-in name, a hub
    id.

    Args:
        changed: dotted keys that the command line sets.

    Raises:
        InputError: a path leads to one file in the file's folder and to another one in the working directory.
    """
    out = {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}
    for section, keys in KEYS.items():
        if isinstance(part := out.get(section), dict):
            known = {key: f"{section}.{key}" for key in keys if key in part}
            part |= {key: _resolve_in(file.parent, part[key], at) for key, at in known.items() if at not in changed}
    data = out.get("data")
    if isinstance(data, dict) and isinstance(clients := data.get("clients"), Mapping):
        data["clients"] = {
            name: _resolve_in(file.parent, path, f"data.clients.{name}") for name, path in clients.items()
        }
    return out


def _resolve_in(folder: Path, value: Any, key: str) -> Any:
    """The path in the folder if it exists there; any other value unchanged."""
    if not isinstance(value, str) or not value or value in BUILT_IN:
        return value
    path = Path(value).expanduser()
    if path.is_absolute():
        return value
    if not (there := folder / path).exists():
        if key.startswith("data.") and not path.exists():
            from fedfm.data.sources._files import remember_missing

            remember_missing(value, folder)
        return str(there) if key in _MADE and not path.exists() else value
    if path.exists() and not path.samefile(there):
        raise InputError(
            f'{key} = "{value}": there is {there}, and {path.resolve()} in the working directory; write the one '
            "that you mean as an absolute path",
            key=key,
        )
    return str(there)
