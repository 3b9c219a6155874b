"""A server that went on after a stop asks for an answer that a site has given already, by the request's name.

A message belongs to one run of Flower's, and a run that is resumed is a new one there: the SuperLink drops what the
former ServerApp asked for and did not pull, and turns away an answer that comes later. So in buffered asynchronous
rounds, where a pass may take many rounds, a site keeps its last answer, and a request may refer to it: the name is the
SHA-256 of the request as it was sent. A site that does not have it says so (E_HELD), and is asked anew.

It is for answers that the server did not pull. Those that it has pulled are on its own disk
(:mod:`fedfm.engines.flower.recovery.pending_requests`), so that no site has to be there to give them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.core import storage
from fedfm.errors import E_FORMAT, E_HELD, ClientFault, RunError

FILE = "last-answer"  # in the private folder of a site
KEY = "+answered"  # the only key of the body that stands for a request


def name_of(handler: str, head: str, data: bytes) -> str:
    """The name of a request as it crosses."""
    digest = hashlib.sha256(f"{handler}\n{len(head)}\n{head}".encode())
    digest.update(data)
    return digest.hexdigest()


def reference(name: str) -> Mapping[str, str]:
    """The body of a message that asks for the answer to the request of this name."""
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
        raise ClientFault(E_FORMAT, "a reference to an answer is no hash")
    return name


class LastAnswer:
    """The last answer of a site to a request for training, on its own disk.

    Args:
        path: the file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def keep(self, name: str, asked: str, head: str, data: bytes) -> None:
        """Write it in place of the one before. A disk that is full costs a second pass after a stop, and no more.

        Args:
            asked: the question, as the silo's ledger names it.
        """
        record = {"name": name, "asked": asked, "head": head, "sha256": hashlib.sha256(data).hexdigest()}
        storage.sweep(self._path.parent, self._path.name)
        try:
            storage.write_atomic(self._path, [json.dumps(record).encode() + b"\n", data], 0o600, sync=False)
        except RunError:
            self._path.unlink(missing_ok=True)

    def find(self, name: str) -> tuple[str, str, bytes] | None:
        """The question, head and data of the answer to the request of this name; None: it is not here, or not whole."""
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
    """What a site says that does not have the answer."""
    return ClientFault(E_HELD, "the answer to that request is not here")
