"""The names of very many clients in a manifest, as ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedfm.core.name_ranges import expand, shorten
from fedfm.errors import InputError


def with_short_names(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest as it is written: very many clients are listed as ranges of names."""
    return manifest | {"clients": shorten(manifest["clients"])}


def with_all_names(manifest: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a manifest that was read from the file ``path``, with the name of every client.

    Raises:
        InputError: the clients are not listed as :func:`with_short_names` lists them.
    """
    try:
        return manifest | {"clients": expand(manifest["clients"])}
    except ValueError as error:
        raise InputError(f'{path} is damaged: "clients": {error}') from None
