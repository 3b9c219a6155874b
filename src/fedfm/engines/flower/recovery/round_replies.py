"""Replies of a round that is not complete. After a stop the server does not repeat requests that have a reply.

If a round has more than 2 GiB of replies, all its requests are repeated. Until the next round begins, the replies are
in ``private/answered`` of the run directory, where only the server's user can read them.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.core import storage
from fedfm.core.messages import Reply, Request
from fedfm.core.wire import payload
from fedfm.errors import RunError

_MOST = 2 << 30  # largest number of bytes of a round's replies; if there are more, none is kept
_KEYS = {"client", "handler", "payload", "value", "down", "up", "spared"}


class RoundReplies:
    """Replies on disk, by round, call and client. A reply to a request with another payload is ignored.

    Args:
        folder: for the replies; it is made on first use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._round, self._size = folder, -1, 0
        self._digest = Digest()

    def find(self, request: Request) -> Reply | None:
        """The stored reply to this request, if there is one."""
        self._begin(request.round)
        path = self._path(request)
        record = storage.load(path, None) if path.exists() else None
        if not isinstance(record, Mapping) or record.keys() != _KEYS:
            return None
        if (record["client"], record["handler"]) != (request.client, request.handler):
            return None
        if record["payload"] != self._digest.of(request):
            return None
        sizes = record["down"], record["up"]
        return Reply(request.client, record["value"], request.round, request.call, *sizes, None, record["spared"])

    def keep(self, request: Request, reply: Reply) -> None:
        """Store a reply. If the disk is full, nothing is stored, and the client may answer twice after a stop."""
        self._begin(request.round)
        self._size += reply.nbytes_up
        if self._size > _MOST:
            self.clear()
            return
        record = {"client": request.client, "handler": request.handler, "payload": self._digest.of(request)}
        sizes = {"down": reply.nbytes_down, "up": reply.nbytes_up, "spared": reply.spared}
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            storage.save(self._path(request), record | sizes | {"value": reply.value}, 0o600, sync=False)
        except (OSError, RunError):
            self.clear()

    def clear(self) -> None:
        """Remove all stored replies."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self, round: int) -> None:
        """Remove the replies of other rounds."""
        if round != self._round:
            self._round, self._size = round, 0
            for path in self._folder.glob("*"):
                if not path.name.startswith(f"{round}-"):
                    path.unlink(missing_ok=True)
                else:
                    self._size += path.stat().st_size

    def _path(self, request: Request) -> Path:
        name = hashlib.sha256(f"{request.handler}\n{request.client}".encode()).hexdigest()[:32]
        return self._folder / f"{request.round}-{request.call}-{name}"


class Digest:
    """SHA-256 of requests' payloads; it is computed once for a broadcast."""

    def __init__(self) -> None:
        self._last: tuple[Mapping[str, Any], str] | None = None

    def of(self, request: Request) -> str:
        """The hash of a request's complete payload."""
        if self._last is None or self._last[0] is not request.payload:
            head, pieces = payload.encode(request.payload)
            digest = hashlib.sha256(head.encode())
            for piece in pieces:
                digest.update(piece)
            self._last = (request.payload, digest.hexdigest())
        return self._last[1]
