"""The interface between the client's code and the rules of a silo with its own file (see ``fedfm.sites``)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fedfm.config.experiment import Experiment
from fedfm.config.registry import name_of
from fedfm.core.method import Method, nested_methods
from fedfm.core.wire import payload
from fedfm.errors import ClientFault
from fedfm.privacy.policy import Policy
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.predictions import PARTS

_SESSION = "fedfm.sites.silo_session"  # the module that has the class SiloSession


@dataclass(frozen=True)
class Question:
    """A server's request that is answered from the silo's rows.

    Attributes:
        at: round and call.
        asked: hash of the request, and of its round if the answer may depend on the round, for the silo's ledger.
        part: ``test`` or ``val`` if the request names one of these parts, else "".
    """

    handler: str
    at: tuple[int, int]
    asked: str
    part: str = ""

    @classmethod
    def of(cls, handler: str, at: tuple[int, int], body: Mapping[str, Any], *, timeless: bool = False) -> Question:
        """Make the question from a message's body.

        Args:
            timeless: whether the answer is the same in every round. Otherwise order of rows, noise, step size and the
                client's memory follow from the round, so the same message in another round is another question.
        """
        head, pieces = payload.encode(body)
        at_round = "" if timeless else f"round {at[0]}\n"
        digest = hashlib.sha256(f"{handler}\n{at_round}{len(head)}\n{head}".encode())
        for piece in pieces:
            digest.update(piece)
        part = body.get("part", "")
        return cls(
            handler, at, digest.hexdigest(), part if part in PARTS else ""
        )  # "part" may be any text that the server sends


def methods_of(experiment: Experiment) -> list[Method[Any]]:
    """An experiment's method and the methods inside it (FedBaF's base), whose halves answer, too."""

    def inside(method: Method[Any]) -> Iterator[Method[Any]]:
        for part in nested_methods(method):
            yield part
            yield from inside(part)

    return [experiment.method, *inside(experiment.method)]


def method_names(experiment: Experiment) -> list[str]:
    """The names of :func:`methods_of`."""
    _, *inner = methods_of(experiment)
    return [experiment.method_name, *(name_of("methods", method) for method in inner)]


class SitePolicy(Protocol):
    """A silo in one run: its rows, the limits in its file, its agreement to the run, its log and its ledger.

    Attributes:
        name: the silo's name.
        policy: the silo's policy, which limits what requests may expose.
        classes: the server's class names; None until the silo has accepted a hello with class names.
    """

    name: str
    policy: Policy
    classes: tuple[str, ...] | None

    @property
    def of_client(self) -> dict[str, Any]:
        """The attributes of :class:`~fedfm.core.client.Client` that come from the silo's file."""

    def reload(self) -> bool:
        """Read the silo's file again if it has changed; return whether it has. Raises a ClientFault."""

    def populate(self, experiment: Experiment, classes: Sequence[str]) -> Partitioned:
        """Load the silo's rows and model. Raises an InputError if the experiment does not fit."""

    def count_hello(self, classes: Sequence[str]) -> None:
        """Count a hello before it is answered. Raises a ClientFault."""

    def agree(self, classes: Sequence[str], what: str) -> None:
        """Agree to the run: from now on the silo takes part."""

    def rereading(self) -> AbstractContextManager[None]:
        """A context for reading the rows again in an agreed run; if the run no longer fits, it counts as a misfit.

        Raises a ClientFault.
        """

    def misfit(self, reason: str) -> None:
        """Log the reason why the silo does not take part."""

    def note(self, text: str) -> None:
        """Write a line into the log."""

    def admit(self, question: Question, experiment: Experiment) -> None:
        """Check before rows are read whether the silo answers. Raises a ClientFault."""

    def leaves(self, question: Question, reply: tuple[str, bytes], experiment: Experiment, fault: str = "") -> None:
        """Enter a reply into the silo's ledger before the reply leaves the silo. Raises a ClientFault."""

    def refuses(self, question: Question, fault: ClientFault, experiment: Experiment) -> ClientFault:
        """Return the fault that the server gets if the answer fails after the silo's rows were read."""

    def log_refusal(self, handler: str, fault: ClientFault) -> None:
        """Log a request that was not answered."""


def session(folder: Path, site: Mapping[str, Any]) -> SitePolicy:
    """Make the silo's session for the run of this folder.

    Args:
        site: the folder's ``site.json``, which names the silo's file.

    Raises:
        InputError: the silo's file is invalid.
    """
    return import_module(_SESSION).SiloSession(folder, site)  # type: ignore[no-any-return]
