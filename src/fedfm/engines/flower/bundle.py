"""Check Flower's bundles. A silo runs only fedfm's own app, which configures the installed code."""

from __future__ import annotations

import io
import tomllib
import zipfile
import zlib

from fedfm.errors import InputError

CLIENT = "fedfm.apps:client"
_FILES = ("pyproject.toml", ".info/CONTENT")  # the second one is Flower's list of hashes
_MOST = 4 << 20  # largest size of a file in bytes; an experiment's text is at most 1 MiB
_UNREADABLE = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, ValueError, KeyError, TypeError)


def check(content: bytes) -> None:
    """Refuse a bundle that is not fedfm's app: it has further files, or its client app is a different one.

    Raises:
        InputError: the bundle is not fedfm's app.
    """
    if difference := _foreign(content):
        raise InputError(f"this silo runs fedfm's own app only, and the bundle {difference}")


def _foreign(content: bytes) -> str:
    """The difference of a bundle from fedfm's app, as the end of a sentence; "" if there is none."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            if more := sorted({*names} - {*_FILES}):
                return f"has {more[0]!r:.80}"
            if sorted(names) != sorted(_FILES):
                return "does not have exactly the files of fedfm's app, each once"
            if max(part.file_size for part in archive.infolist()) > _MOST:
                return f"has a file of more than {_MOST} bytes"
            text = archive.read(_FILES[0]).decode()
        client = tomllib.loads(text)["tool"]["flwr"]["app"]["components"]["clientapp"]
    except _UNREADABLE as error:
        return f"cannot be read: {type(error).__name__}"
    return "" if client == CLIENT else f"names {client!r:.80}"
