"""Which of Flower's bundles a silo runs: fedfm's own app. It is configuration; the code is what the silo installed."""

from __future__ import annotations

import io
import tomllib
import zipfile

from fedfm.errors import InputError

CLIENT = "fedfm.apps:client"
_FILES = ["pyproject.toml", ".info/CONTENT"]  # the second one is Flower's list of hashes
_MOST = 4 << 20  # bytes of a file; an experiment's text is at most 1 MiB


def check(content: bytes) -> None:
    """Refuse a bundle that brings code or names other code.

    Raises:
        InputError: it does.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sorted(archive.namelist()) != sorted(_FILES):
                more = sorted({*archive.namelist()} - {*_FILES}) or ["a file twice or none"]
                raise InputError(f"this silo runs fedfm's own app only, and the bundle has {more[0]!r:.80}")
            if any(part.file_size > _MOST for part in archive.infolist()):
                raise InputError(f"a file of the bundle is larger than {_MOST} bytes")
            project = tomllib.loads(archive.read("pyproject.toml").decode())
        client = project["tool"]["flwr"]["app"]["components"]["clientapp"]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, KeyError, TypeError, EOFError) as error:
        raise InputError(f"the bundle cannot be read: {type(error).__name__}") from None
    if client != CLIENT:
        raise InputError(f"this silo runs fedfm's own app only, and the bundle names {client!r:.80}")
