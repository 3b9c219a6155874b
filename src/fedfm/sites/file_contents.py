"""Keep the contents of files that a running process has read, and find files that have changed since."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class FileContents:
    """The contents of some files. Add a file before it is parsed, so that no later change is missed."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._known: dict[Path, bytes | None] = {}
        self.add(paths)

    def add(self, paths: Iterable[Path]) -> None:
        """Keep the contents of further files."""
        self._known |= {path: _content(path) for path in paths}

    def find_changes(self) -> list[str]:
        """Return the names of the files that have changed or cannot be read any more."""
        return [path.name for path, content in self._known.items() if _content(path) != content]


def _content(path: Path) -> bytes | None:
    """Return the bytes of a file; None if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None
