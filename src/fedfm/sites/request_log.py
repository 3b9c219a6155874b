"""A silo's log of servers' requests, and the limit on hellos that do not fit.

The answer to a hello discloses whether the experiment fits the silo's rows. So after :data:`MISFITS` different hellos
that do not fit, the silo answers no hello until its owner changes ``silo.toml``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedfm.core import storage
from fedfm.core.text import complain, visible
from fedfm.errors import E_REFUSED, ClientFault, NotWritten

MISFITS = 5


class SiloLog:
    """The log and the count of one silo, shared by all its runs.

    Args:
        folder: the silo's own folder.
        silo: the silo's file; a change of it resets the count.
    """

    def __init__(self, folder: Path, silo: Path) -> None:
        self._folder, self._silo = folder, silo
        self.path = folder / "silo.log"

    def note(self, text: str) -> None:
        """Add a line; print it if the disk is full."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            storage.append(self.path, f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {visible(text)}\n")
        except (OSError, NotWritten) as error:
            complain(f"{error}: {text}")

    def asks(self, question: str) -> None:
        """Count a hello as a misfit until :meth:`fits` removes it, so that a crash in between counts too.

        Raises:
            ClientFault: E_REFUSED, too many hellos did not fit.
        """
        with self._alone():
            misfits = self._misfits()
            if len(misfits) >= MISFITS:
                raise ClientFault(E_REFUSED, "this silo answers no hello: too many did not fit")
            self._keep([*misfits, _digest(question)])

    def fits(self, question: str) -> None:
        """Remove a hello that fits from the count."""
        with self._alone():
            self._keep([known for known in self._misfits() if known != _digest(question)])

    def misfit(self, why: str) -> None:
        """Log why a hello did not fit, and whether the next one is answered."""
        count = len(self._misfits())
        self.note(f"a hello did not fit, {count} of {MISFITS}: {why}")
        if count >= MISFITS:
            self.note(f"no hello is answered from here on, until {self._silo.name} is changed")

    def _keep(self, misfits: list[str]) -> None:
        value = {"silo": self._stamp(), "misfits": list(dict.fromkeys(misfits))}
        storage.write_atomic(self._folder / "hello.json", json.dumps(value).encode(), 0o600)

    def _misfits(self) -> list[str]:
        try:
            kept = json.loads((self._folder / "hello.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        return list(kept["misfits"]) if kept["silo"] == self._stamp() else []

    def _stamp(self) -> str:
        return hashlib.sha256(self._silo.read_bytes()).hexdigest()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the count: the workers of several runs share it."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self._folder / "hello.lock", "w", opener=storage.private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _digest(question: str) -> str:
    return hashlib.sha256(question.encode(errors="surrogatepass")).hexdigest()
