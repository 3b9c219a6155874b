"""After a restart the server fetches a client's cached reply by request hash.

A message belongs to one Flower run, and a resumed run is a new Flower run. So the SuperLink drops replies that the
former ServerApp did not pull, and rejects later ones. In buffered asynchronous rounds one training may take many
rounds. So a client host caches its last reply, and the server can ask for it by name: the SHA-256 of the request as
sent. A host without that reply answers with E_HELD, and gets the request again.

The cache is only for replies that the server has not pulled. Pulled replies are on the server's own disk
(:mod:`fedfm.engines.flower.recovery.pending_requests`), so no client has to be connected for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.core import storage
from fedfm.errors import E_FORMAT, E_HELD, ClientFault, RunError

FILE = "last-answer"  # in the private folder of a client
KEY = "+answered"  # the only key of a body that replaces a request


def name_of(handler: str, head: str, data: bytes) -> str:
    """The name of a request in the form in which it crosses."""
    digest = hashlib.sha256(f"{handler}\n{len(head)}\n{head}".encode())
    digest.update(data)
    return digest.hexdigest()


def reference(name: str) -> Mapping[str, str]:
    """The body of a message that asks for the cached reply to the request of this name."""
    return {KEY: name}


def referenced_name(body: Any) -> str | None:
    """The name in such a body; None for any other body.

    Raises:
        ClientFault: E_FORMAT, it has no name.
    """
    if not isinstance(body, Mapping) or body.keys() != {KEY}:
        return None
    name = body[KEY]
    if not isinstance(name, str):
        raise ClientFault(E_FORMAT, "a reference to an answer is not a hash")
    return name


class LastAnswer:
    """A client's last reply to a request for training, on its own disk.

    Args:
        path: the file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, name: str, asked: str, head: str, data: bytes) -> None:
        """Replace the stored reply. If the disk is full, a client may train twice after a stop.

        Args:
            asked: the question, in the form in which the silo's ledger has it.
        """
        record = {"name": name, "asked": asked, "head": head, "sha256": hashlib.sha256(data).hexdigest()}
        storage.sweep(self._path.parent, self._path.name)
        try:
            storage.write_atomic(self._path, [json.dumps(record).encode() + b"\n", data], 0o600, sync=False)
        except RunError:
            self._path.unlink(missing_ok=True)

    def find(self, name: str) -> tuple[str, str, bytes] | None:
        """The question, head and data of the answer to the request of this name; None: it is absent or damaged."""
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
    """The fault of a client host that does not have the reply."""
    return ClientFault(E_HELD, "this client has no answer to that request")
