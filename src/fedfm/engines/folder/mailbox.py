"""A mailbox: the subfolder for one silo's letters in one direction, ``to/NAME`` or ``from/NAME``.

The folder may be on a disk that is absent for a day. A sync tool may complete files late, twice or in any order. A file
that cannot be read now is read later.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedfm.core import storage
from fedfm.core.text import safe_name
from fedfm.engines.folder.letters import REPLY, REQUEST, SERVER, Content, Header, Letter, Unfinished, seal
from fedfm.errors import RunError, reason_of

SUFFIX = ".letter"
_MOST = 1000  # largest number of lines about ignored files, so that nobody can fill the log by writing files
Stamp = tuple[int, int, int]
_AGAIN = 30.0  # an unreadable file is tried again after this many seconds, even if its stamp has not changed


class Mailbox:
    """The letters of one direction between the server and one silo.

    Args:
        root: the folder of all messages. If it is absent, the mailbox is empty, and nothing can be written.
        kind: kind of its letters: request or reply.
        silo: the silo's name.
        key: the key that server and silo share.
        ignored: called with a line, once for each file that is not a letter of this mailbox.

    Attributes:
        most: largest content of a letter in bytes; None means no limit.
    """

    def __init__(self, root: Path, kind: str, silo: str, key: bytes, ignored: Callable[[str], None]) -> None:
        self._root, self._kind, self._key, self._ignored = root, kind, key, ignored
        self.path = root / ("to" if kind == REQUEST else "from") / safe_name(silo)
        self._ends = (SERVER, silo) if kind == REQUEST else (silo, SERVER)
        self.most: int | None = None
        self._bad: dict[str, tuple[Stamp, float]] = {}  # unreadable files by name: stamp, and time of the last attempt
        self._said: set[tuple[str, str]] = set()
        self._whole: dict[str, Stamp] = {}  # by name: stamp of this side's letter when it was last verified

    def file(self, run: str, number: int) -> Path:
        """Path of the letter of a run with this number."""
        return self.path / f"{safe_name(run)}-{number:08d}{SUFFIX}"

    def put(self, run: str, number: int, content: Content) -> bool:
        """Write a letter. Returns False if the folder is absent or full; the caller has to try again.

        Raises:
            RunError: the subfolder is a link, which other users of the folder could redirect.
        """
        for place in (self.path.parent, self.path):
            if place.is_symlink():
                raise RunError(f"{place} is a link; make it a folder")
        if not self._root.is_dir():
            return False
        path = self.file(run, number)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            storage.sweep(self.path, path.name)
            header = Header(self._kind, *self._ends, run, number, 0)
            storage.write_atomic(path, seal(self._key, header, content))
            with contextlib.suppress(OSError):  # not every file system supports this
                storage.sync_folder(self.path)
        except (OSError, RunError) as error:
            self.tell(path.name, f"cannot be written now: {reason_of(error)}")
            return path.exists()
        return True

    def letters(self, wanted: Callable[[Header], bool]) -> Iterator[tuple[Header, Content]]:
        """Yield header and content of the complete letters that ``wanted`` accepts."""
        with contextlib.suppress(OSError):
            names = sorted(os.listdir(self.path))
            self._bad = {name: self._bad[name] for name in names if name in self._bad}
            for name in names:
                if name.endswith(SUFFIX) and not name.startswith("."):
                    yield from self._read(name, wanted)

    def holds(self, run: str, number: int) -> bool:
        """Whether the letter with this number is in the folder, complete and unchanged."""
        path = self.file(run, number)
        if (stamp := stamp_of(path)) is None:
            return False
        if self._whole.get(path.name) != stamp:  # do not open a large letter at every check
            found = any(True for _ in self._read(path.name, lambda h: (h.run, h.number) == (run, number)))
            self._whole = {path.name: stamp} if found else {}
        return bool(self._whole)

    def drop(self, run: str, below: int) -> None:
        """Remove letters of the run that this side wrote and whose numbers are below ``below``."""
        head = f"{safe_name(run)}-"
        with contextlib.suppress(OSError):
            for name in os.listdir(self.path):
                number = name.removeprefix(head).removesuffix(SUFFIX)
                if name == f"{head}{number}{SUFFIX}" and number.isdecimal() and int(number) < below:
                    (self.path / name).unlink(missing_ok=True)

    def _read(self, name: str, wanted: Callable[[Header], bool]) -> Iterator[tuple[Header, Content]]:
        path, now = self.path / name, time.monotonic()
        if (stamp := stamp_of(path)) is None:
            return
        try:
            if name in self._bad and self._bad[name][0] == stamp and now - self._bad[name][1] < _AGAIN:
                return
            with Letter(path) as letter:
                header = letter.header
                if (header.kind, header.sender, header.receiver) != (self._kind, *self._ends):
                    whose = f"a {header.kind} from {header.sender} to {header.receiver}"
                    raise ValueError(f"{whose}, and not a {self._kind} from {self._ends[0]} to {self._ends[1]}")
                if not wanted(header):
                    return
                if self.most is not None and header.size > self.most:
                    raise ValueError(f"a content of {header.size} bytes, expected at most {self.most}")
                content = letter.content(self._key)
            self._bad.pop(name, None)
        except (Unfinished, FileNotFoundError):
            return
        except (OSError, ValueError) as error:
            self._bad[name] = stamp, now
            self.tell(name, f"is ignored: {reason_of(error)}")
            return
        yield header, content

    def tell(self, name: str, text: str) -> None:
        """Report a file of this mailbox, once for each text."""
        if (name, text) not in self._said and len(self._said) < _MOST:
            self._said.add((name, text))
            self._ignored(f"{self.path.parent.name}/{self.path.name}/{name} {text}")


def stamp_of(path: Path) -> Stamp | None:
    """A file's time, size and inode; a change of the file changes at least one of them. None if there is no file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def mailboxes(root: Path, silo: str, key: bytes, ignored: Callable[[str], None]) -> tuple[Mailbox, Mailbox]:
    """A silo's mailbox for requests, and its mailbox for replies."""
    return Mailbox(root, REQUEST, silo, key, ignored), Mailbox(root, REPLY, silo, key, ignored)
