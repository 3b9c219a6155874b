"""Requests of buffered asynchronous rounds, and what was pulled of their answers: on the server's disk.

``private/underway.json`` names the last request to every client: its round, its call, the SHA-256 of its payload, and
the name by which the site keeps its answer (:mod:`fedfm.engines.flower.recall`). ``private/underway/`` has the answer,
as soon as it is pulled. An entry stands until its client is asked the next time, which is after the commit of the round
that its answer was in. A run that goes on after a stop therefore finds all that its last checkpoint waits for.

A request has two hashes. By that of its whole payload this server sees that it is about to send the same again. That of
the message as it crossed, where a hash may stand for parameters, is the name by which the site finds its answer. An
answer here bears the name too, since ``underway.json`` is an older one if the disk was full.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fedfm.core import storage
from fedfm.core.client import ClientId
from fedfm.core.messages import Reply
from fedfm.engines.flower.answered import Digest
from fedfm.errors import RunError

_MOST = 2 << 30  # bytes of answers; those beyond are the sites' alone


@dataclass(frozen=True)
class SentRequest:
    """A request.

    Attributes:
        node: Flower's number of the client's node.
        payload: SHA-256 of its payload, whole.
        name: SHA-256 of the message as it crossed, by which the site keeps its answer.
        nbytes, spared: of the message, for the transcript.
    """

    node: int
    round: int
    call: int
    handler: str
    payload: str
    name: str
    nbytes: int
    spared: int

    @property
    def at(self) -> tuple[int, int]:
        return self.round, self.call


class Outstanding:
    """The last request to each client, and its answer.

    Args:
        folder: the run's ``private``.

    Attributes:
        digest: of payloads, for :class:`SentRequest`.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._folder = folder / "underway.json", folder / "underway"
        self._sent = self._read()
        self._sizes = {path.name: path.stat().st_size for path in self._folder.glob("*")}
        self.digest = Digest()

    def sent(self, client: ClientId) -> SentRequest | None:
        """The last request to a client."""
        return self._sent.get(client)

    def at_work(self) -> dict[int, ClientId]:
        """Clients by node that have not answered, as far as this server knows."""
        return {sent.node: client for client, sent in self._sent.items() if not self._file(client).exists()}

    def enter(self, requests: Mapping[ClientId, SentRequest]) -> None:
        """Write requests that are on their way, in place of their clients' last ones."""
        for client in requests:
            self._remove(client)
        self._sent |= requests
        text = json.dumps({client: asdict(sent) for client, sent in sorted(self._sent.items())}, indent=1)
        with contextlib.suppress(RunError):  # a full disk costs second passes after a stop, and no more
            storage.write_atomic(self._path, text.encode(), 0o600, sync=False)

    def keep(self, client: ClientId, reply: Reply) -> None:
        """Write the answer to a client's last request, if it is one."""
        sent = self._sent.get(client)
        if sent is None or reply.fault is not None or (reply.round, reply.call) != sent.at:
            return
        path = self._file(client)
        sizes = {"down": reply.nbytes_down, "up": reply.nbytes_up, "spared": reply.spared}
        if sum(self._sizes.values()) + reply.nbytes_up > _MOST:
            return
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            storage.save(path, {"name": sent.name, "value": reply.value} | sizes, 0o600, sync=False)
            self._sizes[path.name] = reply.nbytes_up
        except (OSError, RunError):
            self._remove(client)

    def answer(self, client: ClientId) -> Reply | None:
        """The answer to a client's last request, if it was pulled."""
        sent, path = self._sent.get(client), self._file(client)
        told = storage.load(path, None) if sent is not None and path.exists() else None
        if sent is None or not isinstance(told, Mapping) or told.get("name") != sent.name:
            return None
        try:
            return Reply(client, told["value"], *sent.at, told["down"], told["up"], None, told["spared"])
        except KeyError:
            return None

    def clear(self) -> None:
        """Remove all: the run is complete."""
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> dict[ClientId, SentRequest]:
        """What a former process wrote; nothing if it is not whole."""
        try:
            told = json.loads(self._path.read_text(encoding="utf-8"))
            return {client: SentRequest(**sent) for client, sent in told.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _file(self, client: ClientId) -> Path:
        return self._folder / hashlib.sha256(client.encode()).hexdigest()[:32]

    def _remove(self, client: ClientId) -> None:
        path = self._file(client)
        path.unlink(missing_ok=True)
        self._sizes.pop(path.name, None)
