"""A silo's log of servers' requests, and the limit on experiments that do not fit.

A hello is the first request of a run. The answer to it discloses whether the experiment fits the silo's rows. So after
:data:`MISFITS` different hellos that do not fit, the silo answers no hello until its owner changes ``silo.toml``. The
same limit, with a separate count, holds for runs that the silo agreed to and that no longer fit when its rows are read
again. Without this second limit, a server could make the silo agree to many experiments, and learn something about
changed rows from the experiments that no longer fit.
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
from fedfm.errors import E_REFUSED, ClientFault, NotWritten, reason_of

MISFITS = 5
HELLOS, RUNS = "hellos", "runs"  # the two kinds of misfits, each with its count


class SiloLog:
    """The log and the counts of misfits of one silo, which all its runs share.

    Args:
        folder: the silo's own folder.
        silo: path of the silo's file; when this file changes, both counts start again at zero.
    """

    def __init__(self, folder: Path, silo: Path) -> None:
        self._folder, self._silo = folder, silo
        self.path = folder / "silo.log"

    def note(self, text: str) -> None:
        """Add a line to the log; print it if the disk is full."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            storage.append(self.path, f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {visible(text)}\n")
        except (OSError, NotWritten) as error:
            complain(f"{reason_of(error)}: {text}")

    def asks(self, question: str, of: str = HELLOS) -> None:
        """Count an experiment as a misfit until :meth:`fits` removes it. So a crash in between counts as a misfit too.

        Args:
            question: text that identifies the experiment.
            of: the count to use: HELLOS; or RUNS, if the silo agreed to the run and reads its rows again.

        Raises:
            ClientFault: with E_REFUSED if too many experiments did not fit.
        """
        with self._alone():
            misfits = self._misfits()
            if len(misfits[of]) >= MISFITS and (of == HELLOS or _digest(question) not in misfits[of]):
                what = "no hello" if of == HELLOS else "nothing in this run"
                raise ClientFault(E_REFUSED, f"this silo answers {what}: too many experiments did not fit")
            misfits[of].append(_digest(question))
            self._keep(misfits)

    def fits(self, question: str, of: str = HELLOS) -> None:
        """Remove an experiment from the count of misfits, since it fits."""
        with self._alone():
            misfits = self._misfits()
            misfits[of] = [known for known in misfits[of] if known != _digest(question)]
            self._keep(misfits)

    def misfit(self, why: str, of: str = HELLOS) -> None:
        """Log why an experiment did not fit, and whether the next one is answered."""
        count = len(self._misfits()[of])
        if of == HELLOS:
            self.note(f"a hello did not fit, {count} of {MISFITS}: {why}")
        else:
            self.note(why)
        if count >= MISFITS:
            what = "hello" if of == HELLOS else "other run for which rows have to be read again"
            self.note(f"no {what} is answered from here on, until {self._silo.name} is changed")

    def _keep(self, misfits: dict[str, list[str]]) -> None:
        value = {"silo": self._stamp(), "misfits": {of: list(dict.fromkeys(known)) for of, known in misfits.items()}}
        storage.write_atomic(self._folder / "hello.json", json.dumps(value).encode(), 0o600)

    def _misfits(self) -> dict[str, list[str]]:
        none: dict[str, list[str]] = {HELLOS: [], RUNS: []}
        try:
            kept = json.loads((self._folder / "hello.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return none
        if kept["silo"] != self._stamp():
            return none
        known = kept["misfits"]
        return none | (known if isinstance(known, dict) else {HELLOS: list(known)})  # an earlier version wrote a list

    def _stamp(self) -> str:
        return hashlib.sha256(self._silo.read_bytes()).hexdigest()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the counts, because the workers of several runs share them."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self._folder / "hello.lock", "w", opener=storage.private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _digest(question: str) -> str:
    return hashlib.sha256(question.encode(errors="surrogatepass")).hexdigest()
