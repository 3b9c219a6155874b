"""Parse a client's reply: the envelope with a value or a fault, and the answer to a hello.

A hello is the first message to a client. It asks for the client's name, versions and model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from fedfm.core.client import ClientId
from fedfm.core.text import NAME_WORDS, is_name
from fedfm.core.wire import flower_records
from fedfm.errors import (
    E_CLIENT,
    E_DUPLICATE,
    E_EXCEPTION,
    E_FORMAT,
    E_READONLY,
    E_VERSION,
    ClientFault,
)
from fedfm.version import __version__

_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})(?:[.a-z+-][0-9A-Za-z.+-]{0,30})?")  # major, minor, the rest


class Envelope(NamedTuple):
    """The envelope of a reply.

    Attributes:
        body: the value; None if the client reports a fault.
        fault: the fault that the client reports instead of a value; None if there is a value.
    """

    round: int
    call: int
    body: Any
    fault: ClientFault | None


def parse_envelope(value: Any) -> Envelope:
    """Parse a reply's envelope.

    Raises:
        ClientFault: E_FORMAT, the reply is not an envelope.
    """
    if not isinstance(value, Mapping) or not {"round", "call"} < value.keys():
        raise ClientFault(E_FORMAT, "the reply is not an envelope")
    if type(value["round"]) is not int or type(value["call"]) is not int:
        raise ClientFault(E_FORMAT, "the reply's round and call are not integers")
    at = value["round"], value["call"]
    if "fault" in value:
        return Envelope(*at, None, _parse_fault(value["fault"]))
    if "body" not in value:
        raise ClientFault(E_FORMAT, "the reply has no body")
    return Envelope(*at, value["body"], None)


def _parse_fault(value: Any) -> ClientFault:
    """Parse the fault that a client reports."""
    code, reason = (value.get("code"), value.get("reason")) if isinstance(value, Mapping) else (None, None)
    if not isinstance(code, str) or not isinstance(reason, str):
        return ClientFault(E_FORMAT, "the reply's fault is malformed")
    # Clients may not report these three codes, since only the server can detect such faults.
    if not code.startswith("E_") or len(code) > 20 or code in (E_READONLY, E_DUPLICATE, E_CLIENT):
        code = E_EXCEPTION
    return ClientFault(code, reason[:400])


def works_with(theirs: object, ours: str = __version__) -> bool:
    """Whether two versions of fedfm run together: those of one major version, at most one minor version apart."""
    found = [m for text in (theirs, ours) if isinstance(text, str) and (m := _VERSION.fullmatch(text))]
    if len(found) < 2:
        return False
    (major, minor), (other_major, other_minor) = ((int(m[1]), int(m[2])) for m in found)
    return major == other_major and abs(minor - other_minor) <= 1


def other_version(client: ClientId, value: Mapping[str, Any]) -> str:
    """A line on a client that takes part with another version of fedfm; "" if it has the server's."""
    theirs = value.get("fedfm")
    if theirs == __version__:
        return ""
    return (
        f"{client} runs fedfm {theirs}, and the server {__version__}: they work together, but the bits of a run are "
        f"those of one version only; install one version everywhere when you can"
    )


def parse_hello(
    value: Any, identity: str | None, expected: Collection[ClientId] = ()
) -> tuple[ClientId, ClientFault | None]:
    """Parse the answer to a hello; return the client's name, and a fault if the client cannot take part.

    Args:
        identity: fingerprint of the server's model; if None, any model is accepted.
        expected: the client names of the experiment; any other name must have the form of a silo's name.

    Raises:
        ClientFault: E_FORMAT, the answer has no valid name.
    """
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ClientFault(E_FORMAT, "its hello has no name")
    if name not in expected and not is_name(name):
        raise ClientFault(E_FORMAT, f"its hello has an invalid name; expected {NAME_WORDS}")
    ours = {"fedfm": __version__, "wire": flower_records.WIRE}
    for key, mine in ours.items():
        if value.get(key) != mine and not (key == "fedfm" and works_with(value.get(key))):
            return name, ClientFault(E_VERSION, f"runs {key} {str(value.get(key))[:40]}, but the server runs {mine}")
    theirs = value.get("model")
    if identity and theirs and theirs != identity:
        if str(theirs).partition("/")[0] == identity.partition("/")[0]:
            return name, ClientFault(
                E_VERSION,
                "its model's tokenizer or image processor prepares rows differently from the server's",
            )
        return name, ClientFault(E_VERSION, f"its model is {str(theirs)[:12]}, but the server's is {identity[:12]}")
    return name, None
