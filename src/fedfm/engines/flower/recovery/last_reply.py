"""After a restart the server fetches a client's cached reply by the hash of the request.

A message belongs to one Flower run, and a resumed run is a new Flower run. So the SuperLink drops replies that the
former ServerApp did not pull, and rejects later ones. In buffered asynchronous rounds one training may take many
rounds, and its result should not be lost. So a client host caches its last reply. The server can ask for it by name:
the SHA-256 of the request as it was sent. If the host lacks that reply, it sends E_HELD and gets the request again.

Only replies that the server has not pulled need this cache. Pulled replies are on the server's own disk
(:mod:`fedfm.engines.flower.recovery.pending_requests`), so the server needs no connected client for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.core import storage
from fedfm.errors import E_FORMAT, E_HELD, ClientFault, RunError

FILE = "last-answer"  # file in a client's private folder
KEY = "+answered"  # the only key of the body that asks for a cached reply


def name_of(handler: str, head: str, data: bytes) -> str:
    """The name of a request: the hash of its bytes as they are sent."""
    digest = hashlib.sha256(f"{handler}\n{len(head)}\n{head}".encode())
    digest.update(data)
    return digest.hexdigest()


def reference(name: str) -> Mapping[str, str]:
    """The body of a message that asks for the cached reply to the request with this name."""
    return {KEY: name}


def referenced_name(body: Any) -> str | None:
    """The request's name in a body that :func:`reference` made; None for any other body.

    Raises:
        ClientFault: E_FORMAT, the body has that form without a valid name.
    """
    if not isinstance(body, Mapping) or body.keys() != {KEY}:
        return None
    name = body[KEY]
    if not isinstance(name, str):
        raise ClientFault(E_FORMAT, "the name of the requested reply is not a hash")
    return name


class LastAnswer:
    """A client's last reply to a training request, on its own disk.

    Args:
        path: the file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, name: str, asked: str, head: str, data: bytes) -> None:
        """Replace the stored reply. If the disk is full, nothing is stored, and a client may train twice after a stop.

        Args:
            asked: the request in the form of the silo's ledger.
        """
        record = {"name": name, "asked": asked, "head": head, "sha256": hashlib.sha256(data).hexdigest()}
        storage.sweep(self._path.parent, self._path.name)
        try:
            storage.write_atomic(self._path, [json.dumps(record).encode() + b"\n", data], 0o600, sync=False)
        except RunError:
            self._path.unlink(missing_ok=True)

    def find(self, name: str) -> tuple[str, str, bytes] | None:
        """The stored reply to the request with this name: ``asked`` of :meth:`keep`, head and data.

        None if the stored reply is to another request, is damaged or does not exist.
        """
        try:
            with open(self._path, "rb") as file:
                record = json.loads(file.readline())
                if record["name"] != name:
                    return None
                data = file.read()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        asked = str(record.get("asked", ""))
        return (asked, record["head"], data) if hashlib.sha256(data).hexdigest() == record["sha256"] else None


def missing() -> ClientFault:
    """The fault of a client host that does not have the requested reply."""
    return ClientFault(E_HELD, "this client has no cached reply to that request")
