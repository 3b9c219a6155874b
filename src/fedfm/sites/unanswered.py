"""Marks of the questions that a silo works on: if its process dies, the question counts as an answer.

Whether a process dies may depend on rows: a server can ask a question that exceeds the memory only if a row has some
length. So a locked mark is on the disk from before rows are read until the answer is in the ledger. A mark without a
lock belongs to a process that died. If the same question comes again, the silo still answers it. Before any other
question, the mark becomes a line of the ledger.
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

_DIED = hashlib.sha256(E_DIED.encode()).hexdigest()  # in place of the answer's digest


class Unanswered:
    """The marks of all runs of a silo.

    Args:
        folder: folder of the marks, which is made on first use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: BinaryIO | None = None  # this process's mark: it works on one question at a time

    def begin(self, entry: Entry) -> None:
        """Mark a question; call it before rows are read.

        Args:
            entry: the entry of its answer, as far as it is known.

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
                self._held.flush()  # no sync: a power failure does not depend on rows
            except OSError:
                self.end()
                raise

    def end(self) -> None:
        """Remove this process's mark, once the answer or refusal is in the ledger, or if it depends on no row."""
        if self._held is not None:
            held, self._held = self._held, None
            Path(held.name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # closing tries again to write what a full disk refused
                held.close()

    def settle(self, ledger: Ledger, question: Entry) -> None:
        """Enter the marks of processes that died into the ledger, except this question's own.

        A line above a budget is not written, since then nothing else is answered either.

        Raises:
            Unusable: the ledger takes no line; the marks stay.
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
    """The entry of a mark whose process died; this process now has the lock.

    None: the mark's process lives, or it died before it wrote the mark, and so before it read rows.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found: Entry = conform(json.loads(file.read()), Entry, "")
    except (BlockingIOError, ValueError, ClientFault):
        return None
    return found
