"""The rules of a silo with its own file, as the client's code sees them; ``fedfm.sites`` implements them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fedfm.config.experiment import Experiment
from fedfm.core.wire import payload
from fedfm.errors import ClientFault
from fedfm.privacy.policy import Policy
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.predictions import PARTS

_SESSION = "fedfm.sites.silo_session"  # has the class Own


@dataclass(frozen=True)
class Question:
    """A server's request for an answer from the silo's rows.

    Attributes:
        at: round and call.
        asked: hash of the request, for the silo's ledger.
        part: ``test`` or ``val`` if the request names one of these parts of the rows, else "".
    """

    handler: str
    at: tuple[int, int]
    asked: str
    part: str = ""

    @classmethod
    def of(cls, handler: str, at: tuple[int, int], body: Mapping[str, Any]) -> Question:
        """The question of a message's body."""
        head, pieces = payload.encode(body)
        digest = hashlib.sha256(f"{handler}\n{len(head)}\n{head}".encode())
        for piece in pieces:
            digest.update(piece)
        part = body.get("part", "")
        return cls(handler, at, digest.hexdigest(), part if part in PARTS else "")  # the server may send any text


class SitePolicy(Protocol):
    """A silo in one run: its rows, the limits of its file, its agreement to the run, its log and its ledger.

    Attributes:
        name: the silo's name.
        policy: what its requests may expose.
        classes: the server's class names, after the silo has accepted a hello with them.
    """

    name: str
    policy: Policy
    classes: tuple[str, ...] | None

    @property
    def of_client(self) -> dict[str, Any]:
        """The attributes of :class:`~fedfm.core.client.Client` that come from the silo's file."""

    def reload(self) -> bool:
        """Read the silo's file again if it changed; returns whether it changed. Raises a ClientFault."""

    def populate(self, experiment: Experiment, classes: Sequence[str]) -> Partitioned:
        """The silo's rows and model. Raises an InputError if the experiment does not fit."""

    def count_hello(self, classes: Sequence[str]) -> None:
        """Count a hello before it is answered. Raises a ClientFault."""

    def agree(self, classes: Sequence[str], what: str) -> None:
        """Take part in the run from now on."""

    def rereading(self) -> AbstractContextManager[None]:
        """Read the rows of a run that the silo agreed to: it counts if it no longer fits. Raises a ClientFault."""

    def misfit(self, reason: str) -> None:
        """Log why the silo does not take part."""

    def note(self, text: str) -> None:
        """Log a line."""

    def admit(self, question: Question, experiment: Experiment) -> None:
        """Check before rows are read whether the silo answers. Raises a ClientFault."""

    def leaves(self, question: Question, reply: tuple[str, bytes], experiment: Experiment, fault: str = "") -> None:
        """Enter a reply into the silo's ledger before it leaves. Raises a ClientFault."""

    def refuses(self, question: Question, fault: ClientFault, experiment: Experiment) -> ClientFault:
        """The fault that the server receives for a failure that happened after the silo's rows were read."""

    def log_refusal(self, handler: str, fault: ClientFault) -> None:
        """Log a request that was not answered."""


def session(folder: Path, site: Mapping[str, Any]) -> SitePolicy:
    """The silo in the run of a folder.

    Args:
        site: the folder's ``site.json``, which names the silo's file.

    Raises:
        InputError: the silo's file is wrong.
    """
    return import_module(_SESSION).SiloSession(folder, site)  # type: ignore[no-any-return]
