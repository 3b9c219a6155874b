"""Marks of the questions that a silo works on. If the process dies, the ledger counts the question as answered.

Whether a process dies may depend on rows: a server can ask a question that needs too much memory only if some row is
long. So before rows are read, the silo writes a mark for the question and locks it. It removes the mark when the answer
is in the ledger. A mark without a lock belongs to a process that died. If the same question comes again, the silo still
answers it. Before the silo answers any other question, the mark becomes a line of the ledger.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import BinaryIO

from fedfm.core import storage
from fedfm.core.checks import conform
from fedfm.core.text import to_json
from fedfm.errors import E_DIED, ClientFault
from fedfm.sites.ledger import Entry, Ledger, Unusable

_DIED = hashlib.sha256(E_DIED.encode()).hexdigest()  # stands in the ledger in place of the answer's digest


class Unanswered:
    """The marks of all runs of a silo.

    Args:
        folder: the folder for the marks, which is made on first use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: BinaryIO | None = None  # this process's mark; a process works on one question at a time

    def begin(self, entry: Entry) -> None:
        """Mark a question; call it before rows are read.

        Args:
            entry: the ledger entry of the answer, as far as it is known.

        Raises:
            NotWritten: the disk is full or read-only.
        """
        self.end()
        path = self._path(entry)
        with storage.writing(path):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = open(path, "w+b", opener=storage.private)  # noqa: SIM115 - end() closes it
            fcntl.flock(self._held, fcntl.LOCK_EX)
            try:
                self._held.write(to_json(asdict(entry)).encode())
                self._held.flush()  # no sync: only a power failure could lose the mark, and rows cannot cause it
            except OSError:
                self.end()
                raise

    def end(self) -> None:
        """Remove this process's mark. Call this when the reply is in the ledger, or if the reply depends on no rows."""
        if self._held is not None:
            held, self._held = self._held, None
            Path(held.name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # closing writes the buffer again, which a full disk refuses again
                held.close()

    def settle(self, ledger: Ledger, question: Entry) -> None:
        """Enter into the ledger the marks of processes that died, except a mark of this same question.

        A line of the ledger that would exceed a budget is not written: the silo then refuses other questions as well.

        Raises:
            Unusable: the ledger cannot be written; the marks stay.
        """
        for path in sorted(self._folder.glob("*.json")) if self._folder.is_dir() else ():
            if path == self._path(question):
                continue
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                if (entry := _dead(file)) is not None:
                    try:
                        ledger.enter(replace(entry, form="plain", sha256=_DIED, fault=E_DIED))
                    except Unusable:
                        raise
                    except ClientFault:
                        pass
                    path.unlink(missing_ok=True)

    def _path(self, entry: Entry) -> Path:
        return self._folder / f"{hashlib.sha256(f'{entry.run} {entry.asked}'.encode()).hexdigest()}.json"


def _dead(file: BinaryIO) -> Entry | None:
    """Return the entry of a mark whose process died, and lock the mark for this process.

    The result is None if the mark's process lives, or if it died before it wrote the mark, and so before it read rows.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found: Entry = conform(json.loads(file.read()), Entry, "")
    except (BlockingIOError, ValueError, ClientFault):
        return None
    return found
