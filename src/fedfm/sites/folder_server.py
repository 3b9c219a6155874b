"""A silo that answers requests which come as files in a folder: ``fedfm silo serve``.

The code that a SuperNode runs (client host, policy, budgets and log) also decides here which requests are answered, and
which entries the ledger gets. The number of the newest request is stored in the run's folder at the silo.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfm.core import storage
from fedfm.core.text import visible
from fedfm.engines.flower import client_stub
from fedfm.engines.folder.letters import Content, Header, digest, shared_key
from fedfm.engines.folder.mailbox import mailboxes
from fedfm.errors import E_REFUSED, ClientFault, InputError, lines_of
from fedfm.sites.file_contents import FileContents
from fedfm.sites.request_log import SiloLog

if TYPE_CHECKING:
    from fedfm.engines.flower.client_host import ClientHost

_POLL = (0.1, 2.0)  # seconds between two readings of the folder: shortest and longest
_MOST = 1000  # largest number of log lines about old requests
_STATE = "letters.json"  # file with number and digest of a run's newest request, in the run's folder at the silo


class SiloDesk:
    """Answers the request files for one silo.

    Args:
        path: the silo's file.
        root: the folder of the messages.
        tell: receives a line for each request that was answered, and for each file that is ignored.

    Raises:
        InputError: the silo's file is wrong, or has no key of the silo or of the server.
    """

    def __init__(self, path: Path, root: Path, tell: Callable[[str], None] = lambda text: None) -> None:
        self._path, self._root, self._tell = path.resolve(), root.resolve(), tell
        self._log = SiloLog(self._path.parent / ".fedfm", self._path)
        self._site: tuple[Path, ClientHost] | None = None  # folder and host of the run that was answered last
        self._old: set[tuple[str, int]] = set()
        self._wrong: list[str] = []  # faults of the silo's file that the log has already
        self._load()

    def _load(self) -> None:
        from fedfm.sites import identity as silo_identity
        from fedfm.sites import silo_config

        path, files = self._path, FileContents([self._path])
        silo = silo_config.load(path)
        files.add(silo_identity.files(silo))
        identity = silo_identity.of(silo)
        if identity.key is None:
            raise InputError(
                f'{path}: identity: a folder needs a lasting key; set identity = "silo.key"; '
                "`fedfm silo check` makes the key"
            )
        if not silo.server:
            raise InputError(f"{path}: server: set it to the server's public key, which `fedfm run` prints")
        self.name = silo.name
        try:
            key = shared_key(identity.key, bytes.fromhex(silo.server))
        except InputError as error:
            raise InputError(f"{path}: server: {error}") from None
        self._requests, self._replies = mailboxes(self._root, self.name, key, self._note)
        self._files = files

    def _reload(self) -> bool:
        """Read the silo's file again if this file, the key or the roster changed.

        Returns:
            Whether the file is valid, so that requests may be answered.
        """
        if changed := self._files.find_changes():
            try:
                self._load()
            except InputError as error:
                if (wrong := lines_of(error)) != self._wrong:
                    for line in wrong:
                        self._note(f"nothing is answered: {line}")
                self._wrong = wrong
                return False
            self._note(f"{', '.join(changed)} changed: {self._path.name} is read again")
        self._wrong = []
        return True

    def _note(self, text: str) -> None:
        self._log.note(text)
        self._tell(text)

    def answer(self) -> int:
        """Answer the requests that are in the folder; return the number of answers written."""
        if not self._reload():
            return 0
        newest: dict[str, tuple[Header, Content]] = {}
        for header, content in self._requests.letters(self._fresh):
            if header.run not in newest or header.number > newest[header.run][0].number:
                newest[header.run] = header, content
        return sum(self._answer(header, content) for header, content in newest.values())

    def _fresh(self, header: Header) -> bool:
        """Whether to open a request. It is opened if no newer one has arrived and the folder has no reply to it."""
        number = _state(self._folder(header.run)).get("number", 0)
        old = header.run, header.number
        if header.number < number and old not in self._old and len(self._old) < _MOST:
            self._old.add(old)
            self._log.note(f"request {header.number} of run {header.run[:100]} is ignored: request {number} has come")
        return header.number >= number and not self._replies.holds(header.run, header.number)

    def _folder(self, run: str) -> Path:
        return client_stub.folder_of({"key": run}, {"silo": str(self._path)}, 0)

    def _answer(self, header: Header, content: Content) -> bool:
        """Answer one request, if it is the first one with its number."""
        handler, experiment = content.front.get("handler"), content.front.get("experiment")
        if not isinstance(handler, str) or not isinstance(experiment, str) or not header.run:
            self._note(f"request {header.number} of run {header.run[:100]} is ignored: it has no handler or experiment")
            return False
        asked, state = digest(handler, content.head, [content.data]), _state(self._folder(header.run))
        if header.number == state.get("number") and asked != state.get("digest"):
            self._note(f"request {header.number} of run {header.run[:100]} is ignored: another request had this number")
            return False
        try:
            folder = client_stub.admit({"experiment": experiment, "key": header.run}, {"silo": str(self._path)}, 0)
            record = json.dumps({"number": header.number, "digest": asked})
            storage.write_atomic(folder / _STATE, record.encode(), 0o600)
            head, data = self._site_of(folder).answer(self.name, handler, content.head, content.data)
        except ClientFault as fault:
            self._note(f"run {header.run[:100]}: {handler[:100]} is not answered: {fault}")
            head, data = client_stub.fault_halves(fault, content.head, content.data)
        if not self._replies.put(header.run, header.number, Content({"request": asked}, head, data)):
            return False  # the folder is absent: a later call computes the same answer again
        self._replies.drop(header.run, header.number)
        self._tell(f"run {header.run}: answered request {header.number}, {handler}")
        return True

    def _site_of(self, folder: Path) -> ClientHost:
        """Return the client host of a run; its rows and model stay in memory between the run's requests."""
        from fedfm.engines.flower import client_host

        if self._site is None or self._site[0] != folder:
            self._site = None  # frees the rows of the last run before the rows of another run are read
            try:
                here, _ = client_host.of_folder(folder)
            except (InputError, OSError) as error:
                for line in lines_of(error):
                    self._log.note(f"nothing is answered: {line}")
                raise ClientFault(E_REFUSED, "the silo's file is wrong; its log says why") from None
            here.warm()
            self._site = folder, here
        return self._site[1]


def _state(folder: Path) -> dict[str, Any]:
    """Read number and digest of a run's newest request; the result is empty before the first request.

    Raises:
        InputError: the file is damaged.
    """
    try:
        record = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        return {"number": int(record["number"]), "digest": str(record["digest"])}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{folder / _STATE} is damaged: put it back from a backup") from None


def serve(path: Path, root: Path, *, once: bool, tell: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Answer the requests in a folder until the process is stopped, or with ``once`` until all are answered.

    Args:
        path: the silo's file.
        tell: called with a line for each event.

    Returns:
        ``name``, ``folder``, and ``answered``, the number of answers.

    Raises:
        InputError: the silo's file or the folder is wrong, or another process serves this silo.
    """
    from fedfm.linalg.threads import torch_threads

    if not root.is_dir():
        raise InputError(f"--folder {root}: no such folder; expected the folder that the server's run.folder names")
    with torch_threads(1):
        desk = SiloDesk(path, root, lambda text: tell(visible(text)))
        with _alone(path.resolve().parent / ".fedfm"):
            answered, pause = 0, _POLL[0]
            if not once:
                tell(f"{desk.name}: answers the requests in {root}; Ctrl-C stops it")
            while True:
                count = desk.answer()
                answered += count
                if once and not count:
                    return {"name": desk.name, "folder": str(root), "answered": answered}
                pause = _POLL[0] if count else min(pause * 1.5, _POLL[1])
                if not once:
                    time.sleep(pause)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the silo, so that only one process answers its requests."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(folder / "serve.lock", "w", opener=storage.private) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{folder}: another process serves this silo; stop it first") from None
        yield
