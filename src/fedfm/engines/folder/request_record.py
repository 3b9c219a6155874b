"""The server's requests to one silo, and the silo's replies of the current round, on disk for a resumed run."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path

from fedfm.core import storage
from fedfm.core.text import safe_name
from fedfm.engines.folder.letters import REPLY, SERVER, Content, Header, Letter, Unfinished, seal
from fedfm.errors import InputError

FIRST = 0  # round number of hellos, and of requests before a method's first round


class RequestRecord:
    """The server's record for one silo in one run.

    Args:
        folder: the folder in the run's ``private/`` with the records of all silos.
        key: the key that server and silo share; replies are stored encrypted with it.
        begun: whether a committed round has asked the silo, so that a record must exist.

    Attributes:
        number: number of the newest request; a silo answers no older one.
        digest: digest of the newest request. It is empty after a fault, so that the same request gets a new number.
        since: when the newest request was made for the first time, in seconds since 1970.

    Raises:
        InputError: the record is damaged or missing. It cannot be made anew, since a silo answers each number once.
    """

    def __init__(self, folder: Path, silo: str, key: bytes, begun: bool = False) -> None:
        self._silo, self._key = silo, key
        self._folder = folder / safe_name(silo)
        self._file = self._folder / "sent.json"
        self.number, self.digest, self.since = 0, "", 0.0
        if begun or self._file.exists():
            try:
                record = json.loads(self._file.read_text(encoding="utf-8"))
                self.number, self.digest, self.since = (
                    int(record["number"]),
                    str(record["digest"]),
                    float(record["since"]),
                )
            except (OSError, ValueError, KeyError, TypeError):
                raise InputError(f"{self._file} is damaged or missing: put it back from a backup of the run") from None

    def ask(self, digest: str) -> None:
        """Give a request a number and store it on disk. If the newest request is repeated, it keeps its number."""
        if digest != self.digest:
            self.number, self.digest, self.since = self.number + 1, digest, time.time()
            self._write()

    def close(self) -> None:
        """Let a repetition of the newest request get a new number, because a fault is not a reply."""
        self.digest = ""
        self._write()

    def _write(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = {"number": self.number, "digest": self.digest, "since": self.since}
        storage.write_atomic(self._file, json.dumps(record).encode(), 0o600)

    def keep(self, round: int, digest: str, run: str, content: Content) -> None:
        """Store a reply on disk."""
        path = self._answer(round, digest)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        header = Header(REPLY, self._silo, SERVER, run, self.number, 0)
        storage.write_atomic(path, seal(self._key, header, content), 0o600)

    def answer(self, round: int, digest: str) -> Content | None:
        """The stored reply to a request; None if it is absent or damaged."""
        with contextlib.suppress(OSError, ValueError, Unfinished), Letter(self._answer(round, digest)) as letter:
            return letter.content(self._key)
        return None

    def forget(self, round: int) -> None:
        """Remove the replies of other rounds: earlier rounds are committed."""
        for path in self._folder.iterdir():
            if path.is_dir() and path.name not in (str(FIRST), str(round)):
                shutil.rmtree(path, ignore_errors=True)

    def _answer(self, round: int, digest: str) -> Path:
        return self._folder / str(round) / digest
