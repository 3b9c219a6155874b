"""Send a hash instead of parameters if the client host already has them, e.g. from the evaluation before a round.

A client host caches the parameters in the latest message to it, and the model's initial parameters. Each reply lists
the SHA-256 hashes of the parameters that the host has cached. The server sends a hash in place of listed parameters. If
the host has lost them, it sends the fault E_HELD and gets the complete message again. The hash covers names, dtypes,
shapes and bytes, so the client computes with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from fedfm.core.transport import replace_parts
from fedfm.errors import E_FORMAT, E_HELD, ClientFault
from fedfm.linalg.out_of_core import to_file
from fedfm.linalg.params import Params

NAMES = "held"  # in a reply's envelope: the hashes in the client host's cache; in a hello: whether to list them
KEY = "+held"  # the only key of the mapping that stands for parameters
LEAST = 1 << 14  # bytes; smaller parameters are always sent
_MOST = 64  # largest number of hashes in one reply
_DIGITS = 64  # hexadecimal digits of a SHA-256


class ParameterCache:
    """The parameters that a client host has cached.

    Args:
        start: called before the first message; returns the model's initial parameters, or None without a model.
    """

    def __init__(self, start: Callable[[], Params | None]) -> None:
        self._start, self._first = start, dict[str, Params]()
        self._last: dict[str, Params] = {}

    def begin(self) -> None:
        """Cache the model's initial parameters; call this before a message changes them."""
        first = self._start()
        if first is not None and first.nbytes >= LEAST:
            self._first = {first.sha256(): to_file(first)}

    @property
    def names(self) -> list[str]:
        """Sorted hashes of the cached parameters."""
        return sorted({*self._first, *self._last})[:_MOST]

    def resolve(self, body: Any) -> Any:
        """Replace references in a message's body by the cached parameters; then the body's parameters become the cache.

        Raises:
            ClientFault: E_HELD, the body refers to parameters that are not in the cache.
        """
        now: dict[str, Params] = {}

        def restore(part: Any) -> Params | None:
            if isinstance(part, Params):
                if part.nbytes >= LEAST:
                    now[part.sha256()] = to_file(part)
                return part
            if not (isinstance(part, Mapping) and part.keys() == {KEY}):
                return None
            name = part[KEY]
            if not isinstance(name, str):
                raise ClientFault(E_FORMAT, "a reference to parameters is not a hash")
            found = self._last.get(name, self._first.get(name))
            if found is None:
                raise ClientFault(E_HELD, "the message refers to parameters that this client no longer has")
            now[name] = found
            return found

        body = replace_parts(body, restore)
        self._last = now or self._last
        return body


def refuse_references(body: Any) -> Any:
    """Check that a message's body has no references to cached parameters, and return it.

    Raises:
        ClientFault: E_HELD, the body has such a reference.
    """

    def refuse(part: Any) -> None:
        if isinstance(part, Mapping) and part.keys() == {KEY}:
            raise ClientFault(E_HELD, "the message refers to cached parameters, and this client has no cache")

    replace_parts(body, refuse)
    return body


def hashes(payload: Mapping[str, Any]) -> dict[int, str]:
    """The hash of each parameter vector in a payload, by the vector's ``id``."""
    found = dict[int, str]()

    def see(part: Any) -> Params | None:
        if not isinstance(part, Params):
            return None
        if part.nbytes >= LEAST and id(part) not in found:
            found[id(part)] = part.sha256()
        return part

    replace_parts(payload, see)
    return found


def with_references(payload: Mapping[str, Any], known: Mapping[int, str], held: Container[str]) -> Any:
    """The payload, with references in place of the cached parameters ``held``; :func:`hashes` makes ``known``."""

    def short(part: Any) -> Any:
        if not isinstance(part, Params):
            return None
        return {KEY: known[id(part)]} if known.get(id(part)) in held else part

    return replace_parts(payload, short)


def names_in(value: Any) -> frozenset[str]:
    """The hashes that a reply's envelope lists; empty if the list is malformed."""
    if not isinstance(value, list) or len(value) > _MOST:
        return frozenset()
    return frozenset(name for name in value if isinstance(name, str) and len(name) == _DIGITS)
