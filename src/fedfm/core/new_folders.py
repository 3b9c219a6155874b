"""Write the files of a new folder so that no program reads a part of them as the whole.

The files are written into a hidden folder inside it, and are moved up when all are written. A process that is killed
before leaves the hidden folder, which the next command replaces.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedfm.core import storage
from fedfm.core.locks import alone_in
from fedfm.errors import InputError

_HALF = ".unfinished"
_OPENED = ("config.json", "model.safetensors", "adapter_config.json")  # libraries load no model without these files


def refuse_used(folder: Path, flag: str = "--out") -> None:
    """Refuse a folder that contains more than the rest of a killed process.

    Raises:
        InputError: it is a file, or a folder that is not empty.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{flag} {folder} is a file; give another")
    if folder.exists() and any(path.name != _HALF for path in folder.iterdir()):
        raise InputError(f"{flag} {folder} is not empty; give another")


@contextlib.contextmanager
def fill(folder: Path, doing: str) -> Iterator[Path]:
    """Context manager: an empty folder for the files of ``folder``. At the end they are moved there.

    After an error nothing is left of them.

    Args:
        folder: a new or empty folder.
        doing: what another process may be doing, e.g. "exporting".

    Raises:
        InputError: the folder is not empty, cannot be made, or another process fills it.
    """
    refuse_used(folder)
    with alone_in(folder, doing):
        refuse_used(folder)  # another process may have filled it in the meantime
        half = folder / _HALF
        storage.remove(half)
        try:
            half.mkdir()
            yield half
            move_up(half, folder)
        finally:
            _remove_all(half)


@contextlib.contextmanager
def temporary_folder(name: str = "fedfm-") -> Iterator[Path]:
    """Context manager: a temporary folder for secrets and memories; ``name`` begins its name.

    It is removed at the end, even if Ctrl-C or another signal interrupts the removal.
    """
    folder = Path(tempfile.mkdtemp(prefix=name))
    try:
        yield folder
    finally:
        _remove_all(folder)


def _remove_all(path: Path) -> None:
    try:
        storage.remove(path)
    except KeyboardInterrupt:
        storage.remove(path)
        raise


def move_up(half: Path, folder: Path) -> None:
    """Move all files and folders of ``half`` into ``folder``, those last without which no model loads."""
    last = {name: place for place, name in enumerate(_OPENED, 1)}
    for path in sorted(half.iterdir(), key=lambda path: (last.get(path.name, 0), path.name)):
        os.replace(path, folder / path.name)


def place_of(folder: Path) -> Path:
    """Return the folder to which the files of this folder will be moved; without a move it is the folder itself."""
    return folder.parent if folder.name == _HALF else folder
