"""The mark of a silo's ledger: how long it was, so that an older copy of it is recognised."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def mark_of(folder: Path, path: Path) -> Path:
    """Return the path of the mark: the file in a silo's own folder that records how long the ledger was."""
    return folder / "ledgers" / f"{hashlib.sha256(str(path).encode(errors='surrogateescape')).hexdigest()[:32]}.json"


def forget(mark: Path | None) -> None:
    """Remove the mark of an absent ledger: whoever moved the ledger away starts over, and the next begins at zero."""
    if mark is not None:
        mark.unlink(missing_ok=True)


def lacks_lines(content: bytes, mark: Path | None) -> bool:
    """Whether a ledger's content lacks lines that the ledger had before, as an older copy or an emptied file does."""
    if mark is None:
        return False
    try:
        known = json.loads(mark.read_text(encoding="ascii"))
        size, digest = int(known["size"]), known["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return len(content) < size or hashlib.sha256(content[:size]).hexdigest() != digest
