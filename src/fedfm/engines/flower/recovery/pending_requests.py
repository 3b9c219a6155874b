"""Requests of buffered asynchronous rounds, and the replies that were pulled, on the server's disk.

``private/underway.json`` has the last request to every client: its round, its call, the SHA-256 of its payload, and the
name under which the client host caches its reply (:mod:`fedfm.engines.flower.recovery.last_reply`).
``private/underway/`` gets the reply as soon as the reply is pulled. A client may get its next request before the round
that uses its reply is committed. So the previous request and its reply stay, too. They are removed when the client gets
a further request, because the round that uses that reply is committed by then. Thus a run that continues after a stop
finds all replies that its last checkpoint lacks.

A request has two hashes. The server uses the hash of the complete payload to recognise a request that it has sent
before. The client host finds its reply by the hash of the message as it was sent. In such a message, hashes may stand
for parameters. A reply's file is also named after this second hash, since ``underway.json`` is out of date if the disk
was full.
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
from fedfm.engines.flower.recovery.round_replies import Digest
from fedfm.errors import RunError

_MOST = 2 << 30  # largest number of bytes of stored replies; further replies are only in the clients' caches


@dataclass(frozen=True)
class SentRequest:
    """A request that the server has sent.

    Attributes:
        node: Flower's id of the client's node.
        payload: SHA-256 of its complete payload.
        name: SHA-256 of the message as it was sent; the client host caches its reply under this name.
        nbytes, spared: bytes of the message and bytes saved, for the transcript.
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


class PendingRequests:
    """Stores the last request to each client with its reply, and the previous request if that one has a reply.

    Args:
        folder: the run's folder ``private``.

    Attributes:
        digest: computes the hashes of payloads for :class:`SentRequest`.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._folder = folder / "underway.json", folder / "underway"
        self._sent, self._before = dict[ClientId, SentRequest](), dict[ClientId, SentRequest]()
        self._read()
        self._sizes = {path.name: path.stat().st_size for path in self._folder.glob("*")}
        self.digest = Digest()

    def last_requests(self, client: ClientId) -> list[SentRequest]:
        """The last requests to a client, newest first."""
        return [one[client] for one in (self._sent, self._before) if client in one]

    def at_work(self) -> dict[int, ClientId]:
        """The client of each node that has not yet replied to this server."""
        return {sent.node: client for client, sent in self._sent.items() if not self._file(client, sent).exists()}

    def enter(self, requests: Mapping[ClientId, SentRequest]) -> None:
        """Store requests that are being sent. A client's previous request stays if it has a reply."""
        for client, sent in requests.items():
            last = self._sent.get(client)
            if last is None or last.at == sent.at:  # the same request again, with all parameters
                continue
            if (before := self._before.pop(client, None)) is not None:
                self._remove(self._file(client, before))
            if self._file(client, last).exists():
                self._before[client] = last
        self._sent |= requests
        record = {
            client: asdict(sent) | ({"before": asdict(self._before[client])} if client in self._before else {})
            for client, sent in sorted(self._sent.items())
        }
        with contextlib.suppress(RunError):  # if the disk is full, a client trains again after a stop
            storage.write_atomic(self._path, json.dumps(record, indent=1).encode(), 0o600, sync=False)

    def keep(self, client: ClientId, reply: Reply) -> None:
        """Store a reply if it answers the client's last request."""
        sent = self._sent.get(client)
        if sent is None or reply.fault is not None or (reply.round, reply.call) != sent.at:
            return
        path = self._file(client, sent)
        sizes = {"down": reply.nbytes_down, "up": reply.nbytes_up, "spared": reply.spared}
        if sum(self._sizes.values()) + reply.nbytes_up > _MOST:
            return
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            storage.save(path, {"name": sent.name, "value": reply.value} | sizes, 0o600, sync=False)
            self._sizes[path.name] = reply.nbytes_up
        except (OSError, RunError):
            self._remove(path)

    def answer(self, client: ClientId, sent: SentRequest) -> Reply | None:
        """The stored reply to one of :meth:`last_requests`, or None."""
        path = self._file(client, sent)
        record = storage.load(path, None) if path.exists() else None
        if not isinstance(record, Mapping) or record.get("name") != sent.name:
            return None
        try:
            return Reply(client, record["value"], *sent.at, record["down"], record["up"], None, record["spared"])
        except KeyError:
            return None

    def clear(self) -> None:
        """Remove all files, since the run is complete."""
        self._path.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        """Read what an earlier server process stored; ignore it if it is damaged."""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            for client, record in json.loads(self._path.read_text(encoding="utf-8")).items():
                before = record.pop("before", None)
                self._sent[client] = SentRequest(**record)
                if before is not None:
                    self._before[client] = SentRequest(**before)

    def _file(self, client: ClientId, sent: SentRequest) -> Path:
        return self._folder / hashlib.sha256(f"{sent.name}\n{client}".encode()).hexdigest()[:32]

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._sizes.pop(path.name, None)
